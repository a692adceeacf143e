"""Random training scripts as source text: `generate(seed)`."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.differential.features import FEATURES, KINDS, Feature
from benchmarks.differential.gan import gan_parts
from benchmarks.differential.models import model_source

STEPS = 5
PLAN_OPTIONS = "micro-batches"  # a strategy may refuse them for the batch at hand
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script: what it consists of, and its text."""

    seed: int
    kind: str
    strategy: str
    ranks: int
    features: tuple[str, ...]
    places: tuple[str, ...]  # names that a refusal may point to
    source: str

    def lines(self) -> frozenset[int]:
        """Return the numbers of the lines that belong to a feature."""
        ends = tuple(f"  # {name}" for name in self.features)
        text = self.source.splitlines()
        return frozenset(n for n, line in enumerate(text, 1) if line.endswith(ends))

    def __str__(self) -> str:
        return f"{self.seed}: {self.kind}, {self.strategy} on {self.ranks} ranks; " + (
            ", ".join(self.features) or "no feature"
        )


def generate(seed: int) -> Script:
    """Return the script of this seed; the same in every process."""
    draw = random.Random(f"shardwise {seed}")
    kind = draw.choice((*KINDS, *KINDS, "gan"))
    ranks = draw.choice((2, 2, 3, 4))
    strategy = draw.choice(STRATEGIES)
    features = _features(draw, kind, draw.choice((0, 1, 1, 1, 2, 2, 3, 4)))
    options: dict[str, str] = {}
    for feature in features:
        options.update(feature.options)
    call = _strategy_call(draw, strategy, ranks)
    places = tuple(sorted({place for feature in features for place in feature.places}))
    names = tuple(feature.name for feature in features)
    if PLAN_OPTIONS in call:
        names += (PLAN_OPTIONS,)
    if kind == "gan":  # a plan may have to store a parameter of both steps in two ways
        places += tuple(
            f"{module}.{layer}.{name}"
            for module in "GD"
            for layer in ("first", "second")
            for name in ("weight", "bias")
        )
    writer = _Writer(draw, seed, kind, ranks, call, features, options)
    return Script(
        seed=seed,
        kind=kind,
        strategy=strategy,
        ranks=ranks,
        features=names,
        places=places,
        source=writer.source(),
    )


def _features(draw: random.Random, kind: str, count: int) -> list[Feature]:
    chosen: list[Feature] = []
    for feature in draw.sample(FEATURES, len(FEATURES)):
        if len(chosen) == count:
            break
        used = {option for other in chosen for option in other.options}
        groups = {other.group for other in chosen if other.group}
        if kind in feature.kinds and feature.group not in groups and not used & {*feature.options}:
            chosen.append(feature)
    return sorted(chosen, key=FEATURES.index)


def _strategy_call(draw: random.Random, strategy: str, ranks: int) -> str:
    options: dict[str, object] = {}
    if strategy == "pipeline":
        options = {"pp": ranks, "num_microbatches": draw.choice((1, 2))}
    elif strategy == "hybrid":
        shapes: Mapping[int, Sequence[dict[str, object]]] = {
            2: ({"dp": 2, "zero": 2}, {"tp": 2}, {"pp": 2, "num_microbatches": 2}),
            3: ({"dp": 3, "zero": 1}, {"tp": 3}, {"dp": 3, "zero": 3}),
            4: (
                {"dp": 2, "tp": 2},
                {"dp": 2, "tp": 2, "zero": 2},
                {"dp": 2, "pp": 2, "num_microbatches": 2},
                {"tp": 2, "pp": 2, "num_microbatches": 2},
            ),
        }
        options = draw.choice(shapes[ranks])
    elif draw.random() < 0.1:
        options = {"num_microbatches": 2}
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    mark = f"  # {PLAN_OPTIONS}" if "num_microbatches" in options else ""
    return f"sw.strategies.{strategy}(graph, sw.Cluster.local({ranks}){given}){mark}"


@dataclass(frozen=True, slots=True)
class _Writer:
    """Fills the templates of one script."""

    draw: random.Random
    seed: int
    kind: str
    ranks: int
    strategy_call: str
    features: Sequence[Feature]
    options: Mapping[str, str]

    def slot(self, name: str, indent: int, side: str = "") -> str:
        """Return the lines of all features for a slot, each marked with its feature."""
        lines = []
        for feature in self.features:
            for key in (name, f"{side}:{name}"):
                for line in feature.slots.get(key, "").splitlines():
                    lines.append(f"{line}  # {feature.name}" if line.strip() else "")
        text = "\n".join(lines).replace("TRAINED", "model" if side == "plain" else "pm")
        return textwrap.indent(text, " " * indent)

    def source(self) -> str:
        names = ", ".join(feature.name for feature in self.features) or "no feature"
        parts = [
            f'"""Training script {self.seed}: {names}."""\n\n'
            "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n"
            "import shardwise as sw\n\n"
            "torch.set_default_dtype(torch.float64)",
            self.slot("top", 0),
            *self._body(),
        ]
        return "\n\n\n".join(part for part in parts if part.strip()) + "\n"

    def _body(self) -> list[str]:
        """Return the model, the batches and both loops."""
        if self.kind == "gan":
            return gan_parts(self.draw, self.seed, self.strategy_call, self.options, self.slot)
        return [
            model_source(self.draw, self.kind, self.options, self.slot),
            self._make(),
            self._batches(),
            self._loop("plain"),
            self._loop("parallel"),
        ]

    def _make(self) -> str:
        lines = ["def make():", "    model = Model()", self.slot("made", 4), "    return model"]
        return "\n".join(line for line in lines if line.strip())

    def _batches(self) -> str:
        """Return the batches of all steps, each with its sizes written out."""
        rows = [self.draw.choice((4, 6, 7))] * STEPS
        lengths = [5] * STEPS
        if self.options.get("rows") == "odd":
            rows = [rows[0], *(self.draw.choice((1, 2, 3, 5, 9)) for _ in rows[1:])]
            rows[self.draw.randrange(1, STEPS)] = 1
        if self.options.get("lengths") == "other":
            lengths = [5, *(self.draw.choice((2, 3, 7, 8)) for _ in rows[1:])]
        lines = ["def batches():", f"    torch.manual_seed({1000 + self.seed})", "    made = []"]
        marked = self._marks("rows", "lengths", "ids", "labels", "extra", "flag", "reduction")
        for step in range(STEPS):
            fields = self._fields(step, rows[step], lengths[step])
            items = ", ".join(f'"{name}": {value}' for name, value in fields.items())
            lines.append(f"    made.append({{{items}}}){marked}")
        return "\n".join([*lines, "    return made"])

    def _fields(self, step: int, rows: int, length: int) -> dict[str, str]:
        """Return the fields of one batch, as expressions."""
        bad = step == 2
        if self.kind == "gpt":
            ids = f"torch.randint(0, 11, ({rows}, {length}))"
            fields = {"ids": ids, "labels": ids}
            if self.options.get("ids") == "int32":
                fields["ids"] += ".int()"
            if self.options.get("ids") == "bad" and bad:
                fields["ids"] += ".index_fill(1, torch.tensor([1]), 12)"
            if self.options.get("labels") == "bad" and bad:
                fields["labels"] += ".index_fill(1, torch.tensor([1]), 11)"
            if self.options.get("reduction") == "masked":
                fields["labels"] += f".masked_fill(torch.rand({rows}, {length}) < 0.5, -100)"
        else:
            shape = f"{rows}, 6" if self.kind == "mlp" else f"{rows}, 2, 5, 5"
            fields = {"data": f"torch.randn({shape})", "target": f"torch.randint(0, 3, ({rows},))"}
            if self.options.get("labels") == "bad" and bad:
                fields["target"] += ".index_fill(0, torch.tensor([0]), 1000)"
            if self.options.get("reduction") == "masked":
                fields["target"] += f".masked_fill(torch.arange({rows}) % 2 == 1, -100)"
        if "extra" in self.options:
            extra = ("torch.randn({}, 2)", "None", "")[(step + self.seed) % 3]
            if extra:
                fields["extra"] = extra.format(rows)
        if "flag" in self.options:
            fields["double"] = str(step % 2 == 1)
        return fields

    def _loop(self, side: str) -> str:
        """Return the training loop of one side."""
        note = "gradients_of(model)" if side == "plain" else "pm.gather_gradients()"
        state = "model.state_dict()" if side == "plain" else "pm.gather_state_dict()"
        lines = [f"def {side}(notes, rank):", self.slot("head", 4, side), *self._start(side)]
        lines += ["    " + line for line in self._optimizers(side)]
        lines += [self.slot("ready", 4, side)]
        lines += ["    for step, batch in enumerate(batches()):", self.slot("before", 8, side)]
        lines += ["        " + line for line in self._step(side)]
        inside = 8
        if self.options.get("step") == "accumulate":
            lines += [f"        if step % 2 == 1:{self._marks('step')}"]
            inside = 12
        if self.options.get("step") != "closure":
            lines += [self.slot("after", inside, side)]
            lines += [" " * inside + f"notes.gradients(step, {note})"]
            lines += [
                " " * inside + f"{name}.{call}()"
                for call in ("step", "zero_grad")
                for name in self._optimizer_names()
            ]
        lines += [self.slot("end", inside, side), "        notes.loss(loss)"]
        lines += [self.slot("done", 4, side), f'    notes.state("model", {state})']
        text = "\n".join(line for line in lines if line.strip())
        if side == "plain":
            text = (
                "def gradients_of(model):\n"
                "    return {name: p.grad for name, p in model.named_parameters()}\n\n\n" + text
            )
        return text

    def _start(self, side: str) -> list[str]:
        own = " + rank" if self.options.get("seed") == "rank" else ""
        lines = [f"    torch.manual_seed({self.seed}{own}){self._marks('seed')}"]
        lines += ["    model = make()"]
        if side == "parallel":
            lines += [
                "    example = batches()[0]",
                "    graph = sw.capture(model, example)",
                f"    plan = {self.strategy_call}",
                "    pm = sw.parallelize(model, example, plan, timeout_s=30)",
            ]
        return lines

    def _optimizer_names(self) -> tuple[str, ...]:
        two = self.options.get("optimizers") == "two"
        return ("optimizer", "other") if two else ("optimizer",)

    def _optimizers(self, side: str) -> list[str]:
        """Return the lines that make the optimizers."""
        kind = self.options.get("optimizer") or ("SGD", "AdamW", "Adam")[self.seed % 3]
        options = {
            "SGD": "lr=0.1, momentum=0.9",
            "AdamW": "lr=0.01, weight_decay=0.1",
            "Adam": "lr=0.01",
            "LBFGS": "lr=0.1, max_iter=3",
        }[kind]
        mark = self._marks("groups", "optimizers", "optimizer")
        trained = "model" if side == "plain" else "pm"

        def make(name: str, groups: str) -> str:
            if side == "plain":
                given = groups or "model.parameters()"
                return f"{name} = torch.optim.{kind}({given}, {options}){mark}"
            given = f", {groups}" if groups else ""
            return f"{name} = sw.optimizer(pm, torch.optim.{kind}{given}, {options}){mark}"

        style = self.options.get("groups")
        if style in ("dim", "model"):
            of = "model" if style == "model" else trained
            return [
                f"decayed = [p for p in {of}.parameters() if p.dim() >= 2]{mark}",
                f"rest = [p for p in {of}.parameters() if p.dim() < 2]{mark}",
                make(
                    "optimizer",
                    '[{"params": decayed, "weight_decay": 0.2}, '
                    '{"params": rest, "weight_decay": 0.0}]',
                ),
            ]
        if style == "glob":
            if side == "parallel":
                return [make("optimizer", '[{"params": "*.bias", "weight_decay": 0.0}]')]
            return [
                "biases = [p for n, p in model.named_parameters() if n.endswith('.bias')]",
                "rest = [p for n, p in model.named_parameters() if not n.endswith('.bias')]",
                make("optimizer", '[{"params": biases, "weight_decay": 0.0}, {"params": rest}]'),
            ]
        if self.options.get("optimizers") == "two":
            named = f"{trained}.named_parameters()"
            return [
                f"first = [p for n, p in {named} if n.startswith('first.')]{mark}",
                f"rest = [p for n, p in {named} if not n.startswith('first.')]{mark}",
                make("optimizer", '[{"params": first}]'),
                make("other", '[{"params": rest}]'),
            ]
        return [make("optimizer", "")]

    def _step(self, side: str) -> list[str]:
        """Forward and backward of one batch."""
        mark = self._marks("step")
        style = self.options.get("step")
        if style == "closure":
            if side == "plain":
                run = ['loss = model(**batch)["loss"]', "loss.backward()", "return loss"]
            else:
                run = ["return pm.train_step(batch)"]
            return [
                f"def closure():{mark}",
                *(f"    {line}{mark}" for line in ("optimizer.zero_grad()", *run)),
                f"loss = optimizer.step(closure){mark}",
            ]
        if side == "plain":
            half = " / 2" if style == "accumulate" else ""
            return [f'loss = model(**batch)["loss"]{half}', "loss.backward()"]
        scale = ", scale=0.5" if style == "accumulate" else ""
        return [f"loss = pm.train_step(batch{scale}){mark}"]

    def _marks(self, *options: str) -> str:
        """Return the comment of the first feature that set one of these switches."""
        for feature in self.features:
            if set(options) & set(feature.options):
                return f"  # {feature.name}"
        return ""
