"""MLP on Mesh(dp=3), plan fsdp: ranks 0, 1, 2.

Written by shardwise for the graph G.
Safe to edit; check it with: shardwise verify MODEL.py:FUNCTION --program FOLDER
"""

import torch.nn.functional as F
from torch import nn

from shardwise import runtime as rt

PARAMETERS = (
    rt.ParameterSpec(
        name="layers.0.weight",
        shape=(64, 20),
        dtype="float64",
        sync=("dp",),
        zero=3,
    ),
    rt.ParameterSpec(name="layers.0.bias", shape=(64,), dtype="float64", sync=("dp",), zero=3),
    rt.ParameterSpec(
        name="layers.2.weight",
        shape=(64, 64),
        dtype="float64",
        sync=("dp",),
        zero=3,
    ),
    rt.ParameterSpec(name="layers.2.bias", shape=(64,), dtype="float64", sync=("dp",), zero=3),
    rt.ParameterSpec(
        name="layers.4.weight",
        shape=(7, 64),
        dtype="float64",
        sync=("dp",),
        zero=3,
    ),
    rt.ParameterSpec(name="layers.4.bias", shape=(7,), dtype="float64", sync=("dp",), zero=3),
)
BUFFERS = ()
INPUTS = {
    "x": (rt.Split(axis="dp", dim=0, of=((1, 12, 1),)),),
    "y": (rt.Split(axis="dp", dim=0, of=((1, 12, 1),)),),
}


class Model(nn.Module):
    """This rank's part of MLP."""

    def __init__(self, mesh, rng=None, device="cpu"):
        super().__init__()
        self.dp = mesh.axis("dp")
        self.device = device
        rt.declare(self, "layers.0.weight", (64, 20), "float64")
        rt.declare(self, "layers.0.bias", (64,), "float64")
        rt.declare(self, "layers.2.weight", (64, 64), "float64")
        rt.declare(self, "layers.2.bias", (64,), "float64")
        rt.declare(self, "layers.4.weight", (7, 64), "float64")
        rt.declare(self, "layers.4.bias", (7,), "float64")

    def forward(self, x, y, outputs=False):
        # layers.0 Linear  (zoo_models.py)
        linear = F.linear(x, self.layers[0].weight, self.layers[0].bias)
        # layers.1 GELU  (zoo_models.py)
        gelu = F.gelu(linear)
        # layers.2 Linear  (zoo_models.py)
        linear = F.linear(gelu, self.layers[2].weight, self.layers[2].bias)
        # layers.3 GELU  (zoo_models.py)
        gelu = F.gelu(linear)
        # layers.4 Linear  (zoo_models.py)
        linear = F.linear(gelu, self.layers[4].weight, self.layers[4].bias)
        # MLP  (zoo_models.py)
        partial_loss = rt.partial_loss("mse_loss", linear, y, reduction=0, count=84)
        partial_loss = rt.reduce(partial_loss, self.dp)
        if not outputs:
            return partial_loss
        return partial_loss, (partial_loss,)

# 1 distinct rank programs
