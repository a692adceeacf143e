"""LlamaForCausalLM on Mesh(tp=2), plan tensor: rank 0.

Written by shardwise for the graph G.
Safe to edit; check it with: shardwise verify MODEL.py:FUNCTION --program FOLDER
"""

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import runtime as rt

PARAMETERS = (
    rt.ParameterSpec(
        name="model.embed_tokens.weight",
        shape=(211, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 64, 1),)),),
    ),
    rt.ParameterSpec(
        name="model.layers.0.self_attn.q_proj.weight",
        shape=(64, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 2, 32),)),),
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.self_attn.k_proj.weight",
        shape=(32, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 2, 16),)),),
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.self_attn.v_proj.weight",
        shape=(32, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 2, 16),)),),
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.self_attn.o_proj.weight",
        shape=(64, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 2, 32),)),),
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.mlp.gate_proj.weight",
        shape=(128, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 128, 1),)),),
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.mlp.up_proj.weight",
        shape=(128, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 128, 1),)),),
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.mlp.down_proj.weight",
        shape=(64, 128),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 128, 1),)),),
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.input_layernorm.weight",
        shape=(64,),
        dtype="float64",
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.0.post_attention_layernorm.weight",
        shape=(64,),
        dtype="float64",
        unit="model.layers.0",
    ),
    rt.ParameterSpec(
        name="model.layers.1.self_attn.q_proj.weight",
        shape=(64, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 2, 32),)),),
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.self_attn.k_proj.weight",
        shape=(32, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 2, 16),)),),
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.self_attn.v_proj.weight",
        shape=(32, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 2, 16),)),),
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.self_attn.o_proj.weight",
        shape=(64, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 2, 32),)),),
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.mlp.gate_proj.weight",
        shape=(128, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 128, 1),)),),
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.mlp.up_proj.weight",
        shape=(128, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 128, 1),)),),
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.mlp.down_proj.weight",
        shape=(64, 128),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 128, 1),)),),
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.input_layernorm.weight",
        shape=(64,),
        dtype="float64",
        unit="model.layers.1",
    ),
    rt.ParameterSpec(
        name="model.layers.1.post_attention_layernorm.weight",
        shape=(64,),
        dtype="float64",
        unit="model.layers.1",
    ),
    rt.ParameterSpec(name="model.norm.weight", shape=(64,), dtype="float64"),
    rt.ParameterSpec(
        name="lm_head.weight",
        shape=(211, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 211, 1),)),),
    ),
)
BUFFERS = (
    rt.BufferSpec(
        name="model.rotary_emb.inv_freq",
        shape=(8,),
        dtype="float64",
        persistent=False,
    ),
    rt.BufferSpec(
        name="model.rotary_emb.original_inv_freq",
        shape=(8,),
        dtype="float64",
        persistent=False,
    ),
)
INPUTS = {
    "input_ids": (),
    "labels": (),
}


class LlamaDecoderLayer(nn.Module):
    """model.layers.0 … model.layers.1 (modeling_llama.py)."""

    def __init__(self, mesh, rng, device, path):
        super().__init__()
        self.tp = mesh.axis("tp")
        self.device = device
        rt.declare(self, "input_layernorm.weight", (64,), "float64")
        rt.declare(self, "self_attn.q_proj.weight", (32, 64), "float64")
        rt.declare(self, "self_attn.k_proj.weight", (16, 64), "float64")
        rt.declare(self, "self_attn.v_proj.weight", (16, 64), "float64")
        rt.declare(self, "self_attn.o_proj.weight", (64, 32), "float64")
        rt.declare(self, "post_attention_layernorm.weight", (64,), "float64")
        rt.declare(self, "mlp.gate_proj.weight", (64, 64), "float64")
        rt.declare(self, "mlp.up_proj.weight", (64, 64), "float64")
        rt.declare(self, "mlp.down_proj.weight", (64, 64), "float64")

    def forward(self, x, to, to2):
        # input_layernorm LlamaRMSNorm  (modeling_llama.py)
        to3 = x.to(torch.float32)
        mean = to3.pow(2).mean(dim=(-1,), keepdim=True)
        to4 = (to3 * (mean + 1e-06).rsqrt()).to(torch.float64)
        input_layernorm = self.input_layernorm.weight * to4
        # self_attn.q_proj Linear  (modeling_llama.py)
        input_layernorm = rt.fanout(input_layernorm, self.tp)
        q_proj = F.linear(input_layernorm, self.self_attn.q_proj.weight)
        # self_attn LlamaAttention  (modeling_llama.py)
        transpose = q_proj.reshape(4, 16, 2, 16).transpose(1, 2)
        # self_attn.k_proj Linear  (modeling_llama.py)
        k_proj = F.linear(input_layernorm, self.self_attn.k_proj.weight)
        # self_attn LlamaAttention  (modeling_llama.py)
        transpose2 = k_proj.reshape(4, 16, 1, 16).transpose(1, 2)
        # self_attn.v_proj Linear  (modeling_llama.py)
        v_proj = F.linear(input_layernorm, self.self_attn.v_proj.weight)
        # self_attn LlamaAttention  (modeling_llama.py)
        transpose3 = v_proj.reshape(4, 16, 1, 16).transpose(1, 2)
        unsqueeze = to.unsqueeze(1)
        unsqueeze2 = to2.unsqueeze(1)
        mul = transpose * unsqueeze
        slice_ = transpose[:, :, :, :8]
        add = mul + (torch.cat([transpose[:, :, :, 8:].neg(), slice_], dim=-1) * unsqueeze2)
        mul = transpose2 * unsqueeze
        slice_2 = transpose2[:, :, :, :8]
        add2 = mul + (torch.cat([transpose2[:, :, :, 8:].neg(), slice_2], dim=-1) * unsqueeze2)
        scaled_dot_product_attention = F.scaled_dot_product_attention(
            add,
            add2,
            transpose3,
            is_causal=True,
            scale=0.25,
            enable_gqa=True,
        )
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(4, 16, 32)
        # self_attn.o_proj Linear  (modeling_llama.py)
        o_proj = F.linear(reshape, self.self_attn.o_proj.weight)
        # LlamaDecoderLayer  (modeling_llama.py)
        o_proj = rt.reduce(o_proj, self.tp)
        add = x + o_proj
        # post_attention_layernorm LlamaRMSNorm  (modeling_llama.py)
        to = add.to(torch.float32)
        mean2 = to.pow(2).mean(dim=(-1,), keepdim=True)
        to2 = (to * (mean2 + 1e-06).rsqrt()).to(torch.float64)
        post_attention_layernorm = self.post_attention_layernorm.weight * to2
        # mlp.gate_proj Linear  (modeling_llama.py)
        post_attention_layernorm = rt.fanout(post_attention_layernorm, self.tp)
        gate_proj = F.linear(post_attention_layernorm, self.mlp.gate_proj.weight)
        # mlp.act_fn SiLUActivation  (activations.py)
        act_fn = F.silu(gate_proj)
        # mlp.up_proj Linear  (modeling_llama.py)
        up_proj = F.linear(post_attention_layernorm, self.mlp.up_proj.weight)
        # mlp LlamaMLP  (modeling_llama.py)
        mul = act_fn * up_proj
        # mlp.down_proj Linear  (modeling_llama.py)
        down_proj = F.linear(mul, self.mlp.down_proj.weight)
        # LlamaDecoderLayer  (modeling_llama.py)
        down_proj = rt.reduce(down_proj, self.tp)
        add = add + down_proj
        return add


class Model(nn.Module):
    """This rank's part of LlamaForCausalLM."""

    def __init__(self, mesh, rng=None, device="cpu"):
        super().__init__()
        self.tp = mesh.axis("tp")
        self.device = device
        rt.declare(self, "model.embed_tokens.weight", (211, 32), "float64")
        rt.declare(self, "model.norm.weight", (64,), "float64")
        rt.declare(self, "lm_head.weight", (106, 64), "float64")
        rt.declare_buffer(self, "model.rotary_emb.inv_freq", (8,), "float64", persistent=False)
        rt.declare_buffer(
            self,
            "model.rotary_emb.original_inv_freq",
            (8,),
            "float64",
            persistent=False,
        )
        for i in range(2):
            rt.attach(
                self,
                f"model.layers.{i}",
                LlamaDecoderLayer(mesh, rng, device, f"model.layers.{i}"),
            )

    def forward(self, input_ids, labels, outputs=False):
        # model.embed_tokens Embedding  (modeling_llama.py)
        embed_tokens = F.embedding(input_ids, self.model.embed_tokens.weight, 0)
        # model LlamaModel  (modeling_llama.py)
        unsqueeze = torch.arange(16, device=self.device).unsqueeze(0)
        with torch.no_grad():
            # model.rotary_emb LlamaRotaryEmbedding  (modeling_llama.py)
            to = unsqueeze.unsqueeze(2).to(torch.float32)
            mul = to * self.model.rotary_emb.inv_freq.to(torch.float32)
            cat = torch.cat([mul, mul], dim=-1)
            cos = cat.cos()
            sin = cat.sin()
            to = cos.to(torch.float64)
            rotary_emb = sin.to(torch.float64)
        # model.layers.0  (modeling_llama.py)
        embed_tokens = rt.gather(embed_tokens, self.tp, dim=2, of=64)
        for block in self.model.layers[:2]:
            embed_tokens = block(embed_tokens, to, rotary_emb)
        # model.norm LlamaRMSNorm  (modeling_llama.py)
        to = embed_tokens.to(torch.float32)
        mean = to.pow(2).mean(dim=(-1,), keepdim=True)
        to2 = (to * (mean + 1e-06).rsqrt()).to(torch.float64)
        norm = self.model.norm.weight * to2
        # lm_head Linear  (modeling_llama.py)
        norm = rt.fanout(norm, self.tp)
        lm_head = F.linear(norm, self.lm_head.weight)
        # LlamaForCausalLM  (modeling_llama.py)
        to2 = lm_head.to(torch.float32)
        contiguous = torch.ops.aten.pad.default(
            labels,
            (0, 1),
            "constant",
            -100.0,
        )[:, 1:].contiguous()
        reshape = to2.reshape(64, 106)
        reshape2 = contiguous.reshape(64)
        cross_entropy = rt.cross_entropy(
            reshape,
            reshape2,
            reduction="mean",
            class_axis=self.tp,
            classes=211,
        )
        if not outputs:
            return cross_entropy
        with torch.no_grad():
            full = rt.gather(lm_head, self.tp, dim=2, of=211)
        return cross_entropy, (cross_entropy, full)

# 2 distinct rank programs
