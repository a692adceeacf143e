"""Small Hugging Face models in float64, data with ragged labels, and a training run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

VOCABULARY, LENGTH, ROWS = 50, 12, 22


def loss_as_it_is(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    """Return the loss of causal language models without a cast to float32."""
    from transformers.loss.loss_utils import fixed_cross_entropy

    labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return fixed_cross_entropy(
        logits.view(-1, vocab_size), labels.view(-1), num_items_in_batch, -100
    )


def gpt2(seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    """Build a model of two blocks with tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(dtype)
    model.loss_function = loss_as_it_is
    return model


def lora(seed: int = 0) -> Any:
    """Build the same model with adapters and frozen weights."""
    from peft import LoraConfig, get_peft_model

    model = gpt2(seed)
    torch.manual_seed(seed + 1)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(model, config, autocast_adapter_dtype=False).double()


class Classifier(nn.Module):
    """A plain PyTorch model that does not take a count of items: its loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.down(self.norm(self.up(x)).relu())
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Texts(Dataset[dict[str, Tensor]]):
    """Rows that ignore different numbers of labels."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return text(index)


class Points(Dataset[dict[str, Tensor]]):
    """Rows for `Classifier`."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=draw, dtype=torch.float64)
        return {"x": x, "labels": torch.tensor(index % 3)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same texts as a stream without a length."""

    def __iter__(self) -> Any:
        return map(text, range(64))


def text(index: int, length: int = LENGTH) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(index)
    ids = torch.randint(0, VOCABULARY, (length,), generator=draw)
    labels = ids.clone()
    labels[: index % 7] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate rows with padding to the longest one, which differs between batches."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    lengths = [5 + int(row["input_ids"][0]) % 3 for row in rows]
    longest = max(lengths)
    columns: dict[str, list[Tensor]] = {key: [] for key in fill}
    for row, length in zip(rows, lengths, strict=True):
        for key, padding in fill.items():
            values = row[key][:length]
            columns[key].append(nn.functional.pad(values, (0, longest - length), value=padding))
    return {key: torch.stack(values) for key, values in columns.items()}


def sum_over_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a custom loss: a sum over the count of items in all accumulated batches."""
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, target, reduction="sum")
    return loss / num_items_in_batch


def metrics(prediction: Any) -> dict[str, float]:
    """Return sums over all predictions and labels."""
    return {
        "logits": float(prediction.predictions.sum()),
        "labels": float(prediction.label_ids.sum()),
    }


MODELS = {"gpt2": gpt2, "lora": lora, "classifier": Classifier}
DATA: Mapping[str, Any] = {
    "gpt2": Texts,
    "lora": Texts,
    "classifier": Points,
    "stream": Stream,
    "one more": lambda: Texts(17),
}
ARGS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "log_level": "error",
    "seed": 3,
}


def train(
    model: str = "gpt2",
    args: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    plan: Any = None,
    resume: Any = None,
    data: str | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """Return the losses, norms, metrics and parameters of a training run."""
    import transformers

    from shardwise.integrations.huggingface import ShardwiseTrainer

    transformers.utils.logging.disable_progress_bar()
    kind = transformers.Trainer if plan is None else ShardwiseTrainer
    if plan is not None:
        keywords = {**keywords, "plan": {"name": plan, "args": options} if options else plan}
    made = keywords.pop("made", None) or MODELS[model]()
    rows = DATA[data or model]()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output_dir": folder, **ARGS, **(args or {})}
        trainer = kind(
            made,
            transformers.TrainingArguments(**settings),
            train_dataset=rows,
            eval_dataset=DATA[model](),
            **keywords,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        done = trainer.train(resume_from_checkpoint=resume)
        metrics = trainer.evaluate()
        trainer.save_model(f"{settings['output_dir']}/trained")
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "steps": done.global_step,
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry["grad_norm"] for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs],
        "metrics": {k: v for k, v in metrics.items() if k in WATCHED},
        "parameters": {n: p.detach() for n, p in made.named_parameters() if not p.is_meta},
        "best": trainer.state.best_metric,
    }


def train_on_meta(weights: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Train a model without weights, of which each rank reads its part from a folder."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        made = gpt2()
    result = train(args=args, plan="fsdp", made=made, weights=weights)
    saved = GPT2LMHeadModel.from_pretrained(f"{args['output_dir']}/trained", dtype=torch.float64)
    return {**result, "saved": {n: p.detach() for n, p in saved.named_parameters()}}


WATCHED = ("eval_loss", "eval_logits", "eval_labels")


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any], **limits: float) -> None:
    """Require equal training runs up to float64 rounding; losses are logged in float32."""
    limits = {"rtol": 1e-9, "atol": 1e-11, **limits}
    assert actual["steps"] == expected["steps"]
    assert actual["rates"] == expected["rates"]
    loss = {"rtol": max(3e-7, limits["rtol"]), "atol": 1e-7}
    torch.testing.assert_close(tensors(actual["losses"]), tensors(expected["losses"]), **loss)
    torch.testing.assert_close(tensors(actual["norms"]), tensors(expected["norms"]), **limits)
    for key in actual["metrics"]:
        one, other = actual["metrics"][key], expected["metrics"][key]
        torch.testing.assert_close(one, other, rtol=max(1e-9, limits["rtol"]), atol=1e-9)
    torch.testing.assert_close(actual["parameters"], expected["parameters"], **limits)


def tensors(values: list[Any]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)
