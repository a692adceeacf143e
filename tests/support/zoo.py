"""Tiny instances of real architectures with random weights, without downloads.

`build(name)` returns a model in train mode with all dropout at 0 (or `dropout=`), and a batch for
`model(**batch)`, whose result has a loss. Models are float64 by default for exact comparisons.
"""

from __future__ import annotations

import copy

import torch

from tests.support.zoo_models import DLRM, MLP, FusedGPT, ResNet, UNet

# ------------------------------------------------ Hugging Face models from configurations

TINY = {  # for fields that the configuration of an architecture has
    "vocab_size": 211,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "intermediate_size": 128,
    "hidden_dim": 128,
    "d_ff": 128,
    "ffn_dim": 128,
    "n_inner": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "ffn_hidden_size": 128,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
DROPOUT = (
    "dropout",
    "dropout_rate",
    "attention_dropout",
    "hidden_dropout",
    "activation_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "drop_path_rate",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "summary_first_dropout",
    "ffn_dropout",
    "residual_dropout",
    "embedding_dropout",
    "resid_dropout",
    "attn_dropout",
    "expert_dropout",
    "router_jitter_noise",
    "input_jitter_noise",
    "classifier_dropout_prob",
)


NO_PROBABILITY = ("layerdrop", "jitter", "drop_path")  # layers or noise, not elements


def _config(model_type: str, overrides: dict, dropout: float = 0.0):
    """Return the tiny configuration; an override of None selects the default."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    default = cls()
    fields = {k: v for k, v in TINY.items() if hasattr(default, k)}
    for key in DROPOUT:
        if isinstance(getattr(default, key, None), float):
            fields[key] = 0.0 if any(word in key for word in NO_PROBABILITY) else dropout
    fields |= overrides
    config = cls(**{k: v for k, v in fields.items() if v is not None})
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the grouped kernel does not support float64
    return config


def _tokens(batch: int, length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def _labels(tokens: torch.Tensor) -> torch.Tensor:
    """Ignore a different number of positions per row, so that the mean is not a mean of means."""
    labels = tokens.clone()
    for row in range(labels.shape[0]):
        labels[row, : 1 + 2 * row] = -100
    return labels


def _text(
    auto: str,
    model_type: str,
    *,
    batch: int = 4,
    length: int = 16,
    dropout: float = 0.0,
    **overrides,
):
    import transformers

    config = _config(model_type, overrides, dropout)
    model = getattr(transformers, auto).from_config(config)
    tokens = _tokens(batch, length, 211)
    data = {"input_ids": tokens, "labels": _labels(tokens)}
    if auto == "AutoModelForSequenceClassification":
        data["labels"] = torch.arange(batch) % 5
    if auto == "AutoModelForSeq2SeqLM":
        data["labels"] = _labels(_tokens(batch, 12, 211, 1))
        data["decoder_input_ids"] = _tokens(batch, 12, 211, 2)
    return model, data


def _image(
    model_type: str,
    *,
    batch: int = 4,
    size: int = 32,
    auto: str = "AutoModelForImageClassification",
    dropout: float = 0.0,
    **overrides,
):
    import transformers

    config = _config(model_type, overrides, dropout)
    model = getattr(transformers, auto).from_config(config)
    pixels = torch.randn(
        batch, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return model, {"pixel_values": pixels, "labels": torch.arange(batch) % 5}


def causal(model_type, **kw):
    return lambda dropout=0.0: _text("AutoModelForCausalLM", model_type, dropout=dropout, **kw)


def masked(model_type, **kw):
    return lambda dropout=0.0: _text("AutoModelForMaskedLM", model_type, dropout=dropout, **kw)


def seq2seq(model_type, **kw):
    return lambda dropout=0.0: _text("AutoModelForSeq2SeqLM", model_type, dropout=dropout, **kw)


def classify(model_type, **kw):
    return lambda dropout=0.0: _text(
        "AutoModelForSequenceClassification", model_type, dropout=dropout, **kw
    )


def image(model_type, **kw):
    return lambda dropout=0.0: _image(model_type, dropout=dropout, **kw)


# ------------------------------------------------ plain PyTorch models


def plain(model_cls, **inputs):
    def make(dropout: float = 0.0):
        g = torch.Generator().manual_seed(0)
        return model_cls(), {k: f(g) for k, f in inputs.items()}

    return make


def _gpt(dropout: float = 0.0):
    return FusedGPT(), {"input_ids": _tokens(4, 16, 211), "labels": _labels(_tokens(4, 16, 211, 1))}


def _normal(*shape):
    return lambda g: torch.randn(*shape, generator=g, dtype=torch.float64)


def _ints(high, *shape):
    return lambda g: torch.randint(0, high, shape, generator=g)


ZOO = {
    "mlp": plain(MLP, x=_normal(12, 20), y=_normal(12, 7)),
    "resnet": plain(ResNet, pixel_values=_normal(4, 3, 16, 16), labels=_ints(5, 4)),
    "unet": plain(UNet, x=_normal(4, 3, 16, 16), target=_normal(4, 3, 16, 16)),
    "fused_gpt": _gpt,
    "dlrm": plain(
        DLRM,
        dense=_normal(8, 13),
        sparse=_ints(97, 8, 3),
        label=lambda g: torch.rand(8, generator=g, dtype=torch.float64).round(),
    ),
    "gpt2": causal("gpt2"),
    "gpt_neo": causal("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=4),
    "gpt_neox": causal("gpt_neox"),
    "gptj": causal("gptj", rotary_dim=8),
    "llama": causal("llama"),
    "mistral": causal("mistral"),
    "qwen2": causal("qwen2"),
    "qwen3": causal("qwen3"),
    "gemma": causal("gemma"),
    "gemma2": causal("gemma2"),
    "phi": causal("phi"),
    "phi3": causal("phi3"),
    "falcon": causal("falcon", head_dim=None, num_kv_heads=4),
    "bloom": causal("bloom"),
    "mpt": causal("mpt"),
    "opt": causal("opt", word_embed_proj_dim=64),
    "olmo": causal("olmo"),
    "olmo2": causal("olmo2"),
    "starcoder2": causal("starcoder2"),
    "stablelm": causal("stablelm"),
    "granite": causal("granite"),
    "cohere": causal("cohere"),
    "mixtral": causal("mixtral"),
    "olmoe": causal("olmoe"),
    "qwen2_moe": causal("qwen2_moe"),
    "mamba": causal("mamba"),
    "bert": masked("bert"),
    "roberta": masked("roberta"),
    "distilbert": masked("distilbert"),
    "electra": masked("electra"),
    "deberta_v2": masked("deberta-v2"),
    "bert_classifier": classify("bert"),
    "t5": seq2seq("t5"),
    "bart": seq2seq("bart"),
    "pegasus": seq2seq("pegasus"),
    "vit": image("vit"),
    "deit": image("deit", architectures=["DeiTForImageClassification"]),
    "swin": image(
        "swin",
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=2,
        patch_size=2,
        hidden_size=None,
        num_attention_heads=None,
        num_hidden_layers=None,
        num_layers=None,
    ),
    "convnext": image("convnext", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    "hf_resnet": image("resnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "beit": image("beit"),
    "dinov2": image("dinov2"),
}

_FLAT = {"hidden_size": None, "num_attention_heads": None, "num_hidden_layers": None}

# Architectures that were not looked at while rules were written; only `make zoo` runs them.
FURTHER = {
    **{
        name.replace("-", "_"): causal(name)
        for name in (
            "biogpt", "cohere2", "ctrl", "exaone4", "gemma3_text", "glm", "gpt_bigcode", "helium",
            "nemotron", "olmo3", "openai-gpt", "persimmon", "seed_oss", "smollm3", "falcon_mamba",
            "rwkv",
        )
    },
    **{
        name.replace("-", "_"): masked(name)
        for name in (
            "albert", "camembert", "convbert", "ernie", "esm", "fnet", "megatron-bert",
            "mobilebert", "modernbert", "mpnet", "nystromformer", "rembert", "roformer",
            "squeezebert", "xlm", "flaubert", "data2vec-text",
        )
    },
    **{
        name: seq2seq(name)
        for name in ("blenderbot", "m2m_100", "marian", "mbart", "mt5", "plbart", "umt5")
    },
    **{
        name.replace("-", "_"): image(name) for name in ("data2vec-vision", "ijepa", "vit_msn")
    },
    "bit": image("bit", **_FLAT, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
                 num_groups=4),
    "convnextv2": image("convnextv2", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "regnet": image("regnet", **_FLAT, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
                    groups_width=8),
    "poolformer": image("poolformer", **_FLAT, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
                        patch_size=None),
}  # fmt: skip

# Architectures that were chosen by their names alone, after all rules were written.
UNSEEN = {
    **{
        name.replace("-", "_"): causal(name)
        for name in (
            "apertus", "arcee", "bert-generation", "bitnet", "cwm", "diffllama", "doge", "ernie4_5",
            "glm4", "gpt_neox_japanese", "gpt-sw3", "hunyuan_v1_dense", "jais2", "lfm2",
            "ministral", "nanochat", "vaultgemma",
        )
    },
    **{
        name.replace("-", "_"): masked(name)
        for name in (
            "deberta", "eurobert", "gte", "ibert", "layoutlm", "nomic_bert", "roberta-prelayernorm",
            "xlm-roberta-xl", "yoso",
        )
    },
    **{name.replace("-", "_"): seq2seq(name) for name in ("blenderbot-small", "mvp", "pegasus_x")},
    "dinov2_with_registers": image("dinov2_with_registers"),
    "mobilenet_v1": image("mobilenet_v1", depth_multiplier=0.25),
    "mobilenet_v2": image("mobilenet_v2", depth_multiplier=0.25),
    "focalnet": image("focalnet", embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32],
                      focal_levels=[2, 2], focal_windows=[3, 3], patch_size=4),
    "swinv2": image("swinv2", **_FLAT, num_layers=None, embed_dim=16, depths=[1, 1],
                    num_heads=[2, 4], window_size=4, patch_size=2),
    "pvt": image("pvt", **_FLAT, hidden_sizes=[8, 16, 20, 32], depths=[1, 1, 1, 1]),
    "pvt_v2": image("pvt_v2", **_FLAT, hidden_sizes=[8, 16, 20, 32], depths=[1, 1, 1, 1]),
    "segformer": image("segformer", **_FLAT, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    "mobilevit": image("mobilevit", num_hidden_layers=None, hidden_sizes=[16, 24, 32],
                       neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], patch_size=2),
}  # fmt: skip


_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
# Mixtures of experts, with 5 experts where the router allows it.
EXPERTS = {
    "mixtral": causal("mixtral", num_local_experts=5, num_experts=5),
    "mixtral_losses": causal(
        "mixtral", num_local_experts=5, num_experts=5, output_router_logits=True
    ),
    "qwen3_moe": causal("qwen3_moe", num_experts=5),
    "qwen2_moe": causal("qwen2_moe", num_experts=5),
    "olmoe": causal("olmoe", num_experts=5),
    "gpt_oss": causal("gpt_oss", num_local_experts=5, num_experts=5, layer_types=None),
    "phimoe": causal("phimoe", num_local_experts=5, num_experts=5),
    "granitemoe": causal("granitemoe", num_local_experts=5, num_experts=5),
    "deepseek_v2": causal("deepseek_v2", **_LATENT),
    "deepseek_v3": causal("deepseek_v3", **_LATENT),
    "llama4": causal("llama4_text", num_local_experts=5, num_experts=5),
    "glm4_moe": causal("glm4_moe", n_group=1, topk_group=1),
    "jetmoe": causal("jetmoe", num_local_experts=5, kv_channels=16),
    "jamba": causal("jamba", num_experts=5),
    "hunyuan_moe": causal("hunyuan_v1_moe", num_experts=5),
    "ernie4_5_moe": causal("ernie4_5_moe"),
}


def names() -> list[str]:
    return list(ZOO)


def all_names() -> list[str]:
    """Return the names of the models that `make zoo` runs."""
    return [*ZOO, *FURTHER, *UNSEEN]


def build(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, dropout: float = 0.0):
    torch.manual_seed(seed)
    model, batch = {**ZOO, **FURTHER, **UNSEEN, **EXPERTS}[name](dropout=dropout)
    model = model.to(dtype).train()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return model, copy.deepcopy(batch)


def loss_of(output) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output
