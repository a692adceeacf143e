"""The models of random training scripts, as source text.

All have the modules `first`, `norm`, `second` and `head`, a hidden value `h` and a `loss`, which
features refer to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

_CLASS = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
{modules}
{init}

    def forward(self, {arguments}):
{start}
{hidden_value}
{hidden}
{rest}
{loss_value}
{loss}
        return {{"loss": loss, "out": out}}"""

_MLP = {
    "modules": """\
self.first = nn.Linear(6, {width})
self.norm = {norm}
self.second = nn.Linear({width}, {width})
self.head = nn.Linear({width}, 3)""",
    "hidden_value": "h = torch.tanh({call})",
    "inner": "self.first(data)",
    "rest": "h = h + torch.relu(self.second(h))\nout = self.head(h)",
}
_CONV = {
    "modules": """\
self.first = nn.Conv2d(2, {width}, 3, padding=1)
self.norm = {norm}
self.second = nn.Conv2d({width}, {width}, 3, padding=1)
self.head = nn.Linear({width}, 3)""",
    "hidden_value": "h = torch.tanh({call})",
    "inner": "self.first(data)",
    "rest": "h = h + torch.relu(self.second(h))\nout = self.head(h.mean((2, 3)))",
}
_GPT = {
    "modules": """\
self.first = nn.Embedding(11, {width})
self.norm = {norm}
self.qkv = nn.Linear({width}, {triple})
self.second = nn.Linear({width}, {width})
self.head = nn.Linear({width}, 11{head_options})""",
    "hidden_value": "h = self.first(ids)",
    "inner": "h",
    "rest": """\
rows, length, width = h.shape
q, k, v = self.qkv({call}).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
h = h + attended.transpose(1, 2).reshape(rows, length, width)
h = h + torch.relu(self.second(h))
out = self.head(h)""",
}
_PARTS = {"mlp": _MLP, "conv": _CONV, "gpt": _GPT}
_LIFT = {"mlp": "{}", "conv": "{}[:, :, None, None]", "gpt": "{}[:, None, :]"}


def model_source(
    draw: random.Random, kind: str, options: Mapping[str, str], slot: Callable[[str, int], str]
) -> str:
    """Return the class `Model` of a script."""
    parts = _PARTS[kind]
    width = draw.choice((4, 6, 8, 10))
    tied = "tied" in options
    fields = {
        "width": str(width),
        "triple": str(3 * width),
        "norm": _norm(kind, options, width),
        "call": f"self.norm({parts['inner']})",
        "head_options": ", bias=False" if tied else "",
    }
    modules = parts["modules"].format(**fields)
    if tied:
        modules += "\nself.head.weight = self.first.weight  # tied embedding"
    batch_norm = "  # batch norm" if options.get("norm") == "batch" else ""
    text = _CLASS.format(
        modules=_indent(modules),
        init=slot("init", 8).replace("WIDTH", str(width)),
        arguments=_arguments(kind, options),
        start=slot("start", 8),
        hidden_value=_indent(parts["hidden_value"].format(**fields) + batch_norm),
        hidden=_lifted(slot("hidden", 8), kind),
        rest=_indent(parts["rest"].format(**fields)),
        loss_value=_indent(_loss(kind)),
        loss=slot("loss", 8),
    )
    lines = (line for line in text.splitlines() if line.strip())
    return "\n".join(f"\n{line}" if "def forward" in line else line for line in lines)


def _norm(kind: str, options: Mapping[str, str], width: int) -> str:
    if options.get("norm") == "batch":
        return f"nn.BatchNorm{1 if kind == 'mlp' else 2}d({width})  # batch norm"
    return f"nn.GroupNorm(2, {width})" if kind == "conv" else f"nn.LayerNorm({width})"


def _arguments(kind: str, options: Mapping[str, str]) -> str:
    arguments = "ids, labels" if kind == "gpt" else "data, target"
    if "extra" in options:
        arguments += ", extra=None"
    if "flag" in options:
        arguments += ", double=False"
    return arguments


def _loss(kind: str) -> str:
    if kind == "gpt":
        return "loss = F.cross_entropy(out.flatten(0, 1), labels.flatten())"
    return "loss = F.cross_entropy(out, target)"


def _lifted(text: str, kind: str) -> str:
    """Give what is added to `h` the shape of `h`."""
    lifted = _LIFT[kind].format("self.side(extra)")
    return text.replace("LIFT(self.side(extra))", lifted)


def _indent(text: str) -> str:
    return "\n".join(" " * 8 + line for line in text.splitlines())
