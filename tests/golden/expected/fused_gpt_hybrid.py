"""FusedGPT on Mesh(dp=2, tp=2), plan hybrid: ranks 0, 2.

Written by shardwise for the graph G.
Safe to edit; check it with: shardwise verify MODEL.py:FUNCTION --program FOLDER
"""

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import runtime as rt

PARAMETERS = (
    rt.ParameterSpec(
        name="tok.weight",
        shape=(211, 64),
        dtype="float64",
        aliases=("head.weight",),
        splits=(rt.Split(axis="tp", dim=0, of=((1, 211, 1),)),),
        sync=("dp",),
        zero=0,
    ),
    rt.ParameterSpec(
        name="pos.weight",
        shape=(32, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 32, 1),)),),
        sync=("dp",),
        zero=0,
    ),
    rt.ParameterSpec(
        name="blocks.0.n1.weight",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.n1.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.qkv.weight",
        shape=(192, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((3, 4, 16),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.qkv.bias",
        shape=(192,),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((3, 4, 16),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.o.weight",
        shape=(64, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 4, 16),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.o.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.n2.weight",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.n2.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.up.weight",
        shape=(256, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 256, 1),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.up.bias",
        shape=(256,),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 256, 1),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.down.weight",
        shape=(64, 256),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 256, 1),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.0.down.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.0",
    ),
    rt.ParameterSpec(
        name="blocks.1.n1.weight",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.n1.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.qkv.weight",
        shape=(192, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((3, 4, 16),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.qkv.bias",
        shape=(192,),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((3, 4, 16),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.o.weight",
        shape=(64, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 4, 16),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.o.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.n2.weight",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.n2.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.up.weight",
        shape=(256, 64),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 256, 1),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.up.bias",
        shape=(256,),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=0, of=((1, 256, 1),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.down.weight",
        shape=(64, 256),
        dtype="float64",
        splits=(rt.Split(axis="tp", dim=1, of=((1, 256, 1),)),),
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(
        name="blocks.1.down.bias",
        shape=(64,),
        dtype="float64",
        sync=("dp",),
        zero=0,
        unit="blocks.1",
    ),
    rt.ParameterSpec(name="norm.weight", shape=(64,), dtype="float64", sync=("dp",), zero=0),
    rt.ParameterSpec(name="norm.bias", shape=(64,), dtype="float64", sync=("dp",), zero=0),
)
BUFFERS = ()
INPUTS = {
    "input_ids": (rt.Split(axis="dp", dim=0, of=((1, 4, 1),)),),
    "labels": (rt.Split(axis="dp", dim=0, of=((1, 4, 1),)),),
}


class Block(nn.Module):
    """blocks.0 … blocks.1 (zoo_models.py)."""

    def __init__(self, mesh, rng, device, path):
        super().__init__()
        self.tp = mesh.axis("tp")
        self.device = device
        rt.declare(self, "n1.weight", (64,), "float64")
        rt.declare(self, "n1.bias", (64,), "float64")
        rt.declare(self, "qkv.weight", (96, 64), "float64")
        rt.declare(self, "qkv.bias", (96,), "float64")
        rt.declare(self, "o.bias", (64,), "float64")
        rt.declare(self, "o.weight", (64, 32), "float64")
        rt.declare(self, "n2.weight", (64,), "float64")
        rt.declare(self, "n2.bias", (64,), "float64")
        rt.declare(self, "up.weight", (128, 64), "float64")
        rt.declare(self, "up.bias", (128,), "float64")
        rt.declare(self, "down.bias", (64,), "float64")
        rt.declare(self, "down.weight", (64, 128), "float64")

    def forward(self, x):
        # n1 LayerNorm  (zoo_models.py)
        n1 = F.layer_norm(x, (64,), self.n1.weight, self.n1.bias, 1e-05)
        # qkv Linear  (zoo_models.py)
        n1 = rt.fanout(n1, self.tp)
        qkv = F.linear(n1, self.qkv.weight, self.qkv.bias)
        # FusedGPT  (zoo_models.py)
        chunk, chunk2, chunk3 = qkv.chunk(3, -1)
        transpose = chunk.reshape(2, 16, 2, 16).transpose(1, 2)
        transpose2 = chunk2.reshape(2, 16, 2, 16).transpose(1, 2)
        scaled_dot_product_attention = F.scaled_dot_product_attention(
            transpose,
            transpose2,
            chunk3.reshape(2, 16, 2, 16).transpose(1, 2),
            is_causal=True,
        )
        reshape = scaled_dot_product_attention.transpose(1, 2).reshape(2, 16, 32)
        # o Linear  (zoo_models.py)
        bias = rt.as_partial(self.o.bias, self.tp)
        o = F.linear(reshape, self.o.weight, bias)
        # FusedGPT  (zoo_models.py)
        o = rt.reduce(o, self.tp)
        add = x + o
        # n2 LayerNorm  (zoo_models.py)
        n2 = F.layer_norm(add, (64,), self.n2.weight, self.n2.bias, 1e-05)
        # up Linear  (zoo_models.py)
        n2 = rt.fanout(n2, self.tp)
        up = F.linear(n2, self.up.weight, self.up.bias)
        # FusedGPT  (zoo_models.py)
        gelu = F.gelu(up)
        # down Linear  (zoo_models.py)
        bias = rt.as_partial(self.down.bias, self.tp)
        down = F.linear(gelu, self.down.weight, bias)
        # FusedGPT  (zoo_models.py)
        down = rt.reduce(down, self.tp)
        add = add + down
        return add


class Model(nn.Module):
    """This rank's part of FusedGPT."""

    def __init__(self, mesh, rng=None, device="cpu"):
        super().__init__()
        self.dp = mesh.axis("dp")
        self.tp = mesh.axis("tp")
        self.device = device
        rt.declare(self, "tok.weight", (106, 64), "float64")
        rt.declare(self, "pos.weight", (16, 64), "float64")
        rt.declare(self, "norm.weight", (64,), "float64")
        rt.declare(self, "norm.bias", (64,), "float64")
        for i in range(2):
            rt.attach(self, f"blocks.{i}", Block(mesh, rng, device, f"blocks.{i}"))

    def forward(self, input_ids, labels, outputs=False):
        # tok Embedding  (zoo_models.py)
        tok = rt.embedding_rows(self.tok.weight, input_ids, self.tp, 211)
        # FusedGPT  (zoo_models.py)
        arange = torch.arange(16, device=self.device)
        # pos Embedding  (zoo_models.py)
        pos = rt.embedding_rows(self.pos.weight, arange, self.tp, 32)
        # FusedGPT  (zoo_models.py)
        add = tok + pos
        # blocks.0  (zoo_models.py)
        add = rt.reduce(add, self.tp)
        for block in self.blocks[:2]:
            add = block(add)
        # norm LayerNorm  (zoo_models.py)
        norm = F.layer_norm(add, (64,), self.norm.weight, self.norm.bias, 1e-05)
        # head Linear  (zoo_models.py)
        norm = rt.fanout(norm, self.tp)
        head = F.linear(norm, self.tok.weight)
        # FusedGPT  (zoo_models.py)
        flatten = head.flatten(0, 1)
        flatten2 = labels.flatten()
        cross_entropy = rt.cross_entropy(
            flatten,
            flatten2,
            reduction="none",
            class_axis=self.tp,
            classes=211,
        )
        sum_ = cross_entropy.sum()
        sum_2 = (labels != -100).sum()
        sum_ = rt.reduce(sum_, self.dp)
        sum_2 = rt.reduce(sum_2, self.dp)
        div = sum_ / sum_2
        if not outputs:
            return div
        return div, (div,)

# 2 distinct rank programs
