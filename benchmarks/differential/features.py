"""What a random training script may contain besides a model, data and a loop.

A feature adds lines to slots of a script. `TRAINED` in a line is the object being trained: the
model in plain PyTorch, the parallel module with Shardwise. A slot named `plain:x` or `parallel:x`
is for one of the two runs. Each line ends with the feature's name as a comment, so that the place
of a refusal can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = ("mlp", "conv", "gpt")
ALL = (*KINDS, "gan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Lines for the slots of a script, and the names that a refusal may point to."""

    name: str
    slots: Mapping[str, str]
    places: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    group: str = ""  # of the features in one group, a script has at most one
    options: Mapping[str, str] = field(default_factory=dict)  # switches of the templates


def _set_requires_grad(target: str, value: bool) -> str:
    return (
        "if step == 2:\n"
        f"    for name, parameter in {target}.named_parameters():\n"
        '        if name.startswith("second."):\n'
        f"            parameter.requires_grad_({value})"
    )


_SECOND = ("second.weight", "second.bias", "second", "requires_grad")

FEATURES: tuple[Feature, ...] = (
    # Hooks
    Feature(
        name="gradient hook",
        slots={"made": "model.second.weight.register_hook(lambda grad: 0.5 * grad)"},
        places=_SECOND,
    ),
    Feature(
        name="gradient hook with a norm",
        slots={"made": "model.second.weight.register_hook(lambda grad: grad / (1 + grad.norm()))"},
        places=_SECOND,
    ),
    Feature(
        name="gradient hook that records",
        slots={
            "top": "NORMS = []",
            "made": (
                "model.second.weight.register_hook(lambda grad: NORMS.append(grad.norm().item()))"
            ),
            "done": 'notes.value("recorded norms", NORMS)',
        },
        places=_SECOND,
    ),
    Feature(
        name="post-accumulate hook",
        slots={
            "top": "def halve(parameter):\n    parameter.grad.mul_(0.5)\n",
            "made": "model.second.weight.register_post_accumulate_grad_hook(halve)",
        },
        places=_SECOND,
    ),
    Feature(
        name="forward hook",
        slots={"made": "model.second.register_forward_hook(lambda module, args, out: 1.1 * out)"},
        places=_SECOND,
    ),
    Feature(
        name="forward pre-hook",
        slots={
            "made": "model.second.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))"
        },
        places=_SECOND,
    ),
    Feature(
        name="backward hook",
        slots={
            "made": (
                "model.second.register_full_backward_hook("
                "lambda module, inputs, outputs: (0.5 * inputs[0],))"
            )
        },
        places=_SECOND,
    ),
    Feature(
        name="hook added later",
        slots={
            "before": (
                "if step == 1:\n"
                "    model.second.register_forward_hook(lambda module, args, out: 1.1 * out)"
            )
        },
        places=_SECOND,
    ),
    Feature(
        name="activation hook",
        slots={
            "hidden": "if h.requires_grad:\n"
            "    h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))"
        },
    ),
    # Parametrizations
    Feature(
        name="weight norm",
        group="parametrization",
        slots={"made": "nn.utils.parametrizations.weight_norm(model.second)"},
        places=_SECOND,
    ),
    Feature(
        name="spectral norm",
        group="parametrization",
        slots={"made": "nn.utils.parametrizations.spectral_norm(model.second)"},
        places=(*_SECOND, "_u", "_v"),
    ),
    Feature(
        name="own parametrization",
        group="parametrization",
        slots={
            "top": "class Positive(nn.Module):\n"
            "    def forward(self, weight):\n"
            "        return F.softplus(weight) - 0.5\n",
            "made": (
                'nn.utils.parametrize.register_parametrization(model.second, "weight", Positive())'
            ),
        },
        places=_SECOND,
    ),
    # Python state
    Feature(
        name="annealed attribute",
        slots={
            "init": "self.beta = 1.0",
            "loss": "loss = loss + self.beta * out.square().mean()",
            "before": "model.beta = 1.0 / (1 + step)",
        },
        places=("beta",),
    ),
    Feature(
        name="global setting",
        slots={
            "top": 'SETTINGS = {"scale": 1.0}',
            "loss": 'loss = SETTINGS["scale"] * loss',
            "before": 'SETTINGS["scale"] = 1.0 / (1 + step)',
        },
        places=("SETTINGS",),
    ),
    Feature(
        name="global number",
        slots={
            "top": "SCALE = 1.0",
            "head": "global SCALE",
            "loss": "loss = SCALE * loss",
            "before": "SCALE = 1.0 / (1 + step // 2)",
        },
        places=("SCALE",),
    ),
    Feature(
        name="counter in forward",
        slots={
            "init": "self.calls = 0",
            "start": "self.calls += 1",
            "loss": "loss = loss / self.calls",
        },
        places=("calls",),
    ),
    Feature(
        name="attribute written by forward",
        slots={
            "init": "self.last = torch.zeros(())",
            "hidden": "self.last = h.detach().mean()",
            "after": 'notes.value(f"last of step {step}", model.last)',
        },
        places=("last",),
    ),
    Feature(
        name="list filled by forward",
        slots={
            "init": "self.seen = []",
            "hidden": "self.seen.append(h.shape[0])",
            "done": 'notes.value("seen", model.seen)',
        },
        places=("seen",),
    ),
    Feature(
        name="new attribute written by forward",
        slots={
            "hidden": "self.mean = h.detach().mean()",
            "after": 'notes.value(f"mean of step {step}", model.mean)',
        },
        places=("mean",),
    ),
    Feature(
        name="changing depth",
        kinds=("mlp", "gpt"),
        slots={
            "init": "self.depth = 1\n"
            "self.deeper = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))",
            "hidden": "for layer in self.deeper[: self.depth]:\n    h = h + torch.tanh(layer(h))",
            "before": "model.depth = 1 + step % 2",
        },
        places=("deeper", "deeper.1.weight", "deeper.1.bias", "depth"),
    ),
    Feature(
        name="partial function",
        slots={
            "top": "import functools\n\nSCALED = functools.partial(torch.mul, other=1.0)",
            "loss": "loss = SCALED(loss)",
            "before": 'SCALED.keywords["other"] = 1.0 / (1 + step)',
        },
        places=("SCALED",),
    ),
    Feature(
        name="cached function",
        slots={
            "top": "from functools import lru_cache\n\n\n"
            "@lru_cache\ndef table(size):\n    return torch.full((size,), 1.1)\n",
            "hidden": "h = h * table(1)",
        },
        places=("table",),
    ),
    # State outside of Python
    Feature(
        name="file",
        slots={
            "top": "import os\nimport tempfile\n\n"
            'SETTING = f"{tempfile.gettempdir()}/differential_{os.getpid()}"',
            "head": 'with open(SETTING, "w") as file:\n    file.write("1.0")',
            "loss": "with open(SETTING) as file:\n    loss = loss * float(file.read())",
            "before": 'with open(SETTING, "w") as file:\n    file.write(str(1 + step % 2))',
        },
        places=("SETTING",),
    ),
    Feature(
        name="setting of torch",
        slots={
            "head": "torch.backends.cudnn.benchmark = False",
            "loss": "loss = 2 * loss if torch.backends.cudnn.benchmark else loss",
            "before": "torch.backends.cudnn.benchmark = step % 2 == 1",
            "done": "torch.backends.cudnn.benchmark = False",
        },
        places=("benchmark",),
    ),
    # Buffers
    Feature(
        name="counting buffer",
        slots={
            "init": 'self.register_buffer("count", torch.zeros(()))',
            "start": "self.count += 1",
            "loss": "loss = loss / self.count",
        },
        places=("count",),
    ),
    Feature(
        name="running mean in place",
        group="running",
        slots={
            "init": 'self.register_buffer("running", torch.zeros(()))',
            "hidden": "self.running.mul_(0.9).add_(0.1 * h.detach().mean())\nh = h - self.running",
        },
        places=("running",),
    ),
    Feature(
        name="running mean assigned",
        group="running",
        slots={
            "init": 'self.register_buffer("running", torch.zeros(()))',
            "hidden": "self.running = 0.9 * self.running + 0.1 * h.detach().mean()\n"
            "h = h - self.running",
        },
        places=("running",),
    ),
    Feature(name="batch norm", slots={}, kinds=("mlp", "conv"), options={"norm": "batch"}),
    # Freezing
    Feature(
        name="freeze",
        group="freeze",
        slots={"before": _set_requires_grad("TRAINED", False)},
        places=_SECOND,
    ),
    Feature(
        name="freeze the original model",
        group="freeze",
        slots={"before": _set_requires_grad("model", False)},
        places=_SECOND,
    ),
    Feature(
        name="unfreeze",
        group="freeze",
        slots={
            "made": "model.second.requires_grad_(False)",
            "before": _set_requires_grad("TRAINED", True),
        },
        places=_SECOND,
    ),
    # Batches
    Feature(
        name="optional input",
        slots={
            "init": "self.side = nn.Linear(2, WIDTH)",
            "hidden": "if extra is not None:\n    h = h + LIFT(self.side(extra))",
        },
        places=("extra", "side.weight", "side.bias"),
        options={"extra": "yes"},
    ),
    Feature(
        name="flag in the batch",
        slots={"loss": "if double:\n    loss = 2 * loss"},
        places=("double",),
        options={"flag": "yes"},
    ),
    Feature(
        name="odd batches",
        kinds=ALL,
        slots={},
        places=("data", "target", "ids", "labels"),
        options={"rows": "odd"},
    ),
    Feature(
        name="other lengths",
        slots={},
        places=("ids", "labels"),
        kinds=("gpt",),
        options={"lengths": "other"},
    ),
    Feature(
        name="int32 ids",
        slots={},
        places=("ids", "labels"),
        kinds=("gpt",),
        options={"ids": "int32"},
    ),
    Feature(
        name="id out of range", slots={}, places=("ids",), kinds=("gpt",), options={"ids": "bad"}
    ),
    Feature(
        name="label out of range",
        slots={},
        places=("labels", "target"),
        kinds=("gpt", "mlp"),
        options={"labels": "bad"},
    ),
    Feature(
        name="input changed in place",
        slots={"start": "data.mul_(0.5)"},
        places=("data",),
        kinds=("mlp", "conv"),
    ),
    Feature(name="tied embedding", slots={}, kinds=("gpt",), options={"tied": "yes"}),
    Feature(name="unused module", slots={"init": "self.unused = nn.Linear(3, 2)"}),
    Feature(name="branch on a value", slots={"hidden": "if h.sum() > 0:\n    h = 1.5 * h"}),
    Feature(
        name="penalty on all weights",
        slots={"loss": "loss = loss + 0.01 * sum(p.square().sum() for p in self.parameters())"},
    ),
    Feature(name="masked loss", slots={}, options={"reduction": "masked"}),
    # Weights
    Feature(name="unseeded weights", kinds=ALL, slots={}, options={"seed": "rank"}),
    # Loops
    Feature(name="groups by dim", group="optimizer", slots={}, options={"groups": "dim"}),
    Feature(name="groups by glob", group="optimizer", slots={}, options={"groups": "glob"}),
    Feature(name="groups of the model", group="optimizer", slots={}, options={"groups": "model"}),
    Feature(name="two optimizers", group="optimizer", slots={}, options={"optimizers": "two"}),
    Feature(name="closure", group="optimizer", slots={}, options={"step": "closure"}),
    Feature(
        name="LBFGS",
        group="optimizer",
        slots={},
        places=("LBFGS",),
        options={"step": "closure", "optimizer": "LBFGS"},
    ),
    Feature(
        name="clip the norm",
        group="clip",
        slots={
            "plain:after": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)",
            "parallel:after": "sw.clip_grad_norm_(pm, 0.05)",
        },
    ),
    Feature(
        name="clip the norm with torch",
        group="clip",
        slots={"after": "torch.nn.utils.clip_grad_norm_(TRAINED.parameters(), 0.05)"},
    ),
    Feature(
        name="clip values",
        group="clip",
        kinds=ALL,
        slots={"after": "torch.nn.utils.clip_grad_value_(TRAINED.parameters(), 0.01)"},
    ),
    Feature(
        name="gradient arithmetic",
        kinds=ALL,
        slots={
            "after": "for parameter in TRAINED.parameters():\n"
            "    if parameter.grad is not None:\n"
            "        parameter.grad.mul_(0.5)"
        },
    ),
    Feature(
        name="gradient read",
        slots={
            "after": "norms = [p.grad.norm() for p in TRAINED.parameters() if p.grad is not None]\n"
            'notes.value(f"gradient norm of step {step}", torch.stack(norms).norm())'
        },
    ),
    Feature(
        name="weight clamp",
        kinds=ALL,
        slots={
            "end": "with torch.no_grad():\n"
            "    for parameter in TRAINED.parameters():\n"
            "        parameter.clamp_(-0.3, 0.3)"
        },
    ),
    Feature(
        name="schedule",
        kinds=ALL,
        slots={
            "ready": "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)",
            "end": "scheduler.step()",
        },
    ),
    Feature(
        name="moving average",
        slots={
            "ready": (
                "average = torch.optim.swa_utils.AveragedModel("
                "TRAINED, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))"
            ),
            "end": "average.update_parameters(TRAINED)",
            "plain:done": 'notes.state("average", average.module.state_dict())',
            "parallel:done": 'notes.state("average", average.module.gather_state_dict())',
        },
        places=("deepcopy",),
    ),
    Feature(
        name="evaluation",
        slots={
            "plain:end": (
                "model.eval()\n"
                "with torch.no_grad():\n"
                '    notes.value(f"evaluation of step {step}", model(**batch)["loss"])\n'
                "model.train()"
            ),
            "parallel:end": 'notes.value(f"evaluation of step {step}", pm.eval_loss(batch))',
        },
    ),
    Feature(
        name="reload",
        slots={
            "plain:end": (
                "if step == 1:\n"
                "    model.load_state_dict({n: 0.5 * t if t.is_floating_point() else t "
                "for n, t in model.state_dict().items()})"
            ),
            "parallel:end": (
                "if step == 1:\n"
                "    pm.load_state_dict({n: 0.5 * t if t.is_floating_point() else t "
                "for n, t in pm.gather_state_dict().items()})"
            ),
        },
    ),
    Feature(
        name="weights of the original changed",
        slots={
            "before": "if step == 2:\n"
            "    with torch.no_grad():\n"
            "        model.second.bias.mul_(0.5)"
        },
        places=_SECOND,
    ),
    Feature(
        name="weights copied to the original",
        slots={
            "parallel:end": (
                "model.load_state_dict(pm.gather_state_dict())\n"
                'notes.value(f"weights of step {step}", model.second.bias)'
            ),
            "plain:end": 'notes.value(f"weights of step {step}", model.second.bias)',
        },
    ),
    Feature(
        name="teacher",
        group="parametrization",  # which renames the weight that the teacher follows
        kinds=("mlp", "gpt"),
        slots={
            "init": "self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)",
            "hidden": "h = h + torch.tanh(self.teacher(h)).detach()",
            "end": "with torch.no_grad():\n"
            "    named = dict(TRAINED.named_parameters())\n"
            '    named["teacher.weight"].lerp_(named["second.weight"], 0.1)',
        },
        places=("teacher.weight", "second.weight"),
    ),
    Feature(name="accumulation", group="step", slots={}, options={"step": "accumulate"}),
)

BY_NAME: Mapping[str, Feature] = {feature.name: feature for feature in FEATURES}
