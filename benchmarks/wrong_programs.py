"""Verify wrong rules, programs, edited code and collectives with data that hides the errors.

    python -m benchmarks.wrong_programs [--only ddp tensor rules trees messages] [--json FILE]

Every mutant is first compared with its original on ordinary data, without the verifier: a mutant
that computes the same is equivalent, others are wrong. The verifier then checks it with all hostile
weights and batches, and must not accept a wrong one.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shardwise as sw
from shardwise.collectives.messages import CollectiveChoice, MessageProgram
from shardwise.collectives.messages.check import check as check_messages
from shardwise.collectives.messages.check import interpret
from shardwise.collectives.messages.choice import Tree
from shardwise.collectives.solver.derive import lowered
from shardwise.collectives.solver.derive import verify as verify_trees
from shardwise.equivalence import check, double, run_reference
from shardwise.equivalence.check import make_trials
from shardwise.equivalence.ranks import subject_of
from shardwise.equivalence.reference import widen_graph
from shardwise.errors import ShardwiseError
from shardwise.routing import collect, dispatch, grouped_linear, route
from tests.unit.equivalence import mutations as m

Tensors = dict[str, torch.Tensor]
STRATEGIES = ("ddp", "fsdp", "tensor", "hybrid", "pipeline", "expert", "context")
MAX_TEXTS = 24  # edited texts per strategy
LOOSE = 1e-7


class Net(nn.Module):
    """An embedding, a gated residual block, a head with limits, and a second loss term."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)
        self.gate, self.v = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(6))
        self.register_buffer("limits", torch.zeros(5))
        self.coefficient = 1.0

    def forward(self, ids: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids) + x
        h = h + self.gate * self.block(self.norm(h))
        logits = self.head(h) + self.limits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + self.coefficient * (h * self.v).sum(-1).square().mean()

    def block(self, h: torch.Tensor) -> torch.Tensor:
        """Compute the block between the residuals."""
        return self.down(torch.tanh(self.up(h)))


class RoutedNet(Net):
    """The same block, shared, and two of three experts for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.inner, self.outer = (nn.Parameter(torch.randn(3, *n)) for n in ((4, 6), (6, 4)))

    def block(self, h: torch.Tensor) -> torch.Tensor:
        """Add the rows of experts to the shared block."""
        tokens = h.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        order, counts = route(ids, 3)
        rows = torch.tanh(grouped_linear(dispatch(tokens, order, 2), self.inner, counts))
        rows = collect(grouped_linear(rows, self.outer, counts), order, ids)
        return super().block(h) + (rows * weights.unsqueeze(-1)).sum(1).view_as(h)


class AttendingNet(Net):
    """The same block after causal attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

    def block(self, h: torch.Tensor) -> torch.Tensor:
        """Attend before the shared block."""
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(h).unflatten(-1, (2, 3)).transpose(1, 2) for layer in layers)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().block(h + y.transpose(1, 2).flatten(2))


def build(strategy: str = "") -> tuple[Net, Tensors]:
    """Return the model and a batch that hide nothing."""
    torch.manual_seed(0)
    kinds = {"expert": RoutedNet, "context": AttendingNet}
    model = kinds.get(strategy, Net)().double()
    batch = {
        "ids": torch.randint(11, (6, 3)),
        "x": torch.randn(6, 3, 6, dtype=torch.float64),
        "labels": torch.randint(5, (6, 3)),
    }
    batch["labels"][0, :2] = -100
    return model, batch


# ------------------------------------------------ data that hides faults


def nan_in_batch(model: Net, batch: Tensors) -> None:
    """Set one element of the input to NaN."""
    batch["x"][1, 1, 1] = torch.nan


def infinity_in_batch(model: Net, batch: Tensors) -> None:
    """Set one element of the input to infinity."""
    batch["x"][1, 1, 1] = torch.inf


def nan_in_weights(model: Net, batch: Tensors) -> None:
    """Set one weight to NaN."""
    model.up.weight.data[0, 0] = torch.nan


def zero_batch(model: Net, batch: Tensors) -> None:
    """Set the batch to zero."""
    for tensor in batch.values():
        tensor.zero_()


def zero_layers(model: Net, batch: Tensors) -> None:
    """Set the block, the head and the second term to zero."""
    for layer in (model.down, model.head):
        layer.weight.data.zero_()
        layer.bias.data.zero_()
    model.gate.data.zero_()
    model.v.data.zero_()


def tiny_gate(model: Net, batch: Tensors) -> None:
    """Make the contribution of the block tiny."""
    model.gate.data.fill_(1e-12)


def huge_feature(model: Net, batch: Tensors) -> None:
    """Make one feature far larger than the others."""
    batch["x"][:, :, 0] = 1e15


def huge_weight(model: Net, batch: Tensors) -> None:
    """Make one weight far larger than the others."""
    model.v.data[0] = 1e12


def huge_term(model: Net, batch: Tensors) -> None:
    """Make one term of the loss far larger than the other."""
    model.coefficient = 1e14


def extreme_buffer(model: Net, batch: Tensors) -> None:
    """Set an element of a buffer to the smallest float32."""
    model.limits[1] = torch.finfo(torch.float32).min
    batch["labels"][batch["labels"] == 1] = 0


def few_labels(model: Net, batch: Tensors) -> None:
    """Ignore all labels but one."""
    batch["labels"].fill_(-100)
    batch["labels"][0, 0] = 1


def no_labels(model: Net, batch: Tensors) -> None:
    """Ignore all labels, which makes the loss NaN."""
    batch["labels"].fill_(-100)


SETUPS: dict[str, Callable[[Net, Tensors], None]] = {
    "unchanged": lambda model, batch: None,
    "NaN in the batch": nan_in_batch,
    "infinity in the batch": infinity_in_batch,
    "NaN in the weights": nan_in_weights,
    "a batch of zeros": zero_batch,
    "layers of zeros": zero_layers,
    "a gate of 1e-12": tiny_gate,
    "a feature of 1e15": huge_feature,
    "a weight of 1e12": huge_weight,
    "a loss term of 1e14": huge_term,
    "a buffer with finfo.min": extreme_buffer,
    "one label left": few_labels,
    "no labels": no_labels,
}


# ------------------------------------------------ mutants of programs and texts


@dataclass(frozen=True)
class Mutant:
    """A changed program, or a program with changed texts."""

    name: str
    program: Any
    sources: list[str] | None = None


def mutants(program: Any, plan: sw.Plan) -> Iterator[Mutant]:
    """Yield programs with changed redistributions, storage and texts."""
    if not plan.is_scheduled:
        for mutant in m.move_mutants(program):
            yield Mutant(f"move: {mutant.name}", mutant.program)
        for storage in program.rank_programs[0].parameters:
            if storage.sync or storage.zero:
                broken = m.unsynced(program, storage.name)
                yield Mutant(f"plan: {storage.name} not synchronized", broken)
    yield from list(text_mutants(program))[:MAX_TEXTS]


def text_mutants(program: Any) -> Iterator[Mutant]:
    """Yield edits of all texts: a runtime call removed, or another number or operator."""
    texts = subject_of(program).sources()
    counts = [len(list(_places(ast.parse(text)))) for text in texts]
    for index in range(max(counts)):
        edited, names = [], []
        for text, count in zip(texts, counts, strict=True):
            tree = ast.parse(text)
            if index < count:
                names.append(_edit(list(_places(tree))[index]))
            edited.append(ast.unparse(tree))
        yield Mutant(f"text: {names[0]} ({index})", program, edited)


def _places(tree: ast.Module) -> Iterator[ast.AST]:
    for item in tree.body:
        if not isinstance(item, ast.ClassDef):
            continue
        for method in item.body:
            if isinstance(method, ast.FunctionDef) and method.name == "forward":
                for node in ast.walk(method):
                    if _is_runtime(node) or isinstance(node, ast.BinOp) or _is_number(node):
                        yield node


def _is_runtime(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rt.") and node.args != []
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _edit(node: ast.AST) -> str:
    before = ast.unparse(node)
    if isinstance(node, ast.Constant):
        node.value = node.value + 1 if isinstance(node.value, int) else node.value * 1.5
    elif isinstance(node, ast.BinOp):
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
    elif isinstance(node, ast.Call):
        inner = node.args[0]
        node.func = ast.parse("torch.clone", mode="eval").body
        node.args, node.keywords = [inner], []
    return f"{before} -> {ast.unparse(node)}"


def differs(mutant: Mutant, plain: Sequence[Any], data: Sequence[Any]) -> bool:
    """Return whether a mutant computes other results on ordinary data, without the verifier."""
    other = subject_of(mutant.program)
    for (state, inputs), expected in zip(data, plain, strict=True):
        try:
            texts = mutant.sources or other.sources()
            outcomes = other.run(texts, state, inputs, timeout_s=10)
        except Exception:
            return True
        for outcome, original in zip(outcomes, expected, strict=True):
            outputs = zip(outcome.outputs, original.outputs, strict=True)
            pairs = [(outcome.loss, original.loss), *outputs]
            for kind in ("gradients", "state_after"):
                a, b = getattr(outcome, kind), getattr(original, kind)
                pairs += [(a.get(name), b[name]) for name in b]
            if any(_apart(a, b) for a, b in pairs):
                return True
    return False


def _apart(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is not b and a != b
    if a.shape != b.shape:
        return True
    size = b.abs().max().item() if b.numel() else 0.0
    # Gradients that are zero up to rounding are equal.
    return bool(a.numel()) and (a - b).abs().max().item() > LOOSE * max(size, 1e-6)


def ordinary(model: Net, batch: Tensors, seed: int) -> tuple[Tensors, Tensors]:
    """Return weights and a batch that hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensors = (*model.named_parameters(), *model.named_buffers())
    state = {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64) * 0.5 for n, t in tensors
    }
    inputs = {
        "ids": torch.randint(11, (6, 3), generator=generator),
        "x": torch.randn(6, 3, 6, generator=generator, dtype=torch.float64),
        "labels": torch.randint(5, (6, 3), generator=generator),
    }
    inputs["labels"][seed % 6, 1] = -100
    return state, inputs


def plan_of(graph: sw.Graph, strategy: str) -> sw.Plan:
    """Return a plan of two or four ranks."""
    if strategy == "hybrid":
        return sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2)
    extra: dict[str, dict[str, Any]] = {
        "pipeline": {"num_microbatches": 2},
        "context": {"attention": "ring"},
    }
    options = extra.get(strategy, {})
    plan: sw.Plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2), **options)
    return plan


def sweep_programs(strategy: str, tally: Tally) -> None:
    """Check every mutant of a strategy with every setup."""
    kinds: dict[str, str] = {}  # texts -> name of their mutants in the tally
    for setup, change in SETUPS.items():
        model, batch = build(strategy)
        change(model, batch)
        twin, wide = double(model, batch)
        graph = widen_graph(sw.capture(twin, wide))
        program = sw.compile(graph, plan_of(graph, strategy)).lowered
        all_mutants = list(mutants(program, program.plan))
        try:
            trials = make_trials(program, run_reference(twin, wide), wide)
        except ShardwiseError:
            tally.refused(strategy, setup, all_mutants)
            continue
        subject = subject_of(program)
        name = f"{strategy}, {setup}" if kinds else strategy
        kind = kinds.setdefault(str(subject.sources()), name)
        if not tally.known(kind):
            data = [ordinary(model, batch, s) for s in (1, 2)]
            plain = [subject.run(subject.sources(), *d, timeout_s=10) for d in data]
            tally.wrong[kind] = [differs(mutant, plain, data) for mutant in all_mutants]
        if not check(program, None, wide, trials=trials, timeout_s=10).ok:
            tally.false_alarm(f"{strategy}, {setup}")
        for index, mutant in enumerate(all_mutants):
            certificate = check(
                mutant.program, None, wide, trials=trials, sources=mutant.sources, timeout_s=10
            )
            tally.add(kind, setup, mutant.name, index, accepted=certificate.ok)


# ------------------------------------------------ wrong rules


class CouplesGradients(torch.autograd.Function):
    """Has a correct forward pass; the backward pass subtracts a mean over rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 1.5 * gradient - 0.3 * gradient.mean(0)


RULES = {  # an operator, and a wrong rule for it
    "centered": (lambda x: x - x.mean(0), "b n -> b n"),
    "scaled_by_largest": (lambda x: x / (1 + x.abs().amax(0)), "b n -> b n"),
    "running_sum": (lambda x: x.cumsum(0), "b n -> b n"),
    "flipped": (lambda x: x.flip(0) * 2, "b n -> b n"),
    "rolled": (lambda x: x.roll(1, 0), "b n -> b n"),
    "softmax_of_rows": (lambda x: x.softmax(0), "b n -> b n"),
    "mean_of_rows": (lambda x: x.mean(0), "b+ n -> n"),
    "largest_of_rows": (lambda x: x.amax(0), "b+ n -> n"),
    "squared_sum": (lambda x: x.sum(0).square(), "b+ n -> n"),
    "numbered": (lambda x: x * torch.arange(1.0, 1 + len(x)).to(x)[:, None], "b n -> b n"),
    "counted": (lambda x: x * len(x), "b n -> b n"),
    "sorted": (lambda x: x.sort(0).values * 1.0, "b n -> b n"),
    "couples_gradients": (CouplesGradients.apply, "b n -> b n"),
}


def _define(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return function(x).clone()

    op = torch.library.custom_op(f"wrong::{name}", forward, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(function(x)))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x), x, gradient)[0]

    op.register_autograd(backward, setup_context=setup)


class Ruled(nn.Module):
    """Two layers with an operator between them, and a loss term without it."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.a, self.b, self.operator = nn.Linear(4, 4), nn.Linear(4, 4), operator
        self.gate, self.coefficient = nn.Parameter(torch.ones(4)), 1.0
        self.register_buffer("limits", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(
            getattr(torch.ops.wrong, self.operator)(self.a(x))
        ) * self.gate + self.limits.clamp(-1, 1)
        return y.square().mean() + self.coefficient * self.a(x).square().mean()


def zero_rule(model: Ruled, batch: Tensors) -> None:
    """Set the layers after the operator to zero."""
    model.b.weight.data.zero_()
    model.gate.data.zero_()


RULE_SETUPS: dict[str, Callable[[Any, Tensors], None]] = {
    "unchanged": lambda model, batch: None,
    "NaN in the batch": lambda model, batch: batch["x"][0].fill_(torch.nan),
    "infinity in the batch": lambda model, batch: batch["x"][0].fill_(torch.inf),
    "a batch of zeros": lambda model, batch: batch["x"].zero_(),
    "layers of zeros": zero_rule,
    "a loss term of 1e14": lambda model, batch: setattr(model, "coefficient", 1e14),
    "a buffer with finfo.min": lambda model, batch: model.limits.fill_(-3e38),
    "a row of 1e12": lambda model, batch: batch["x"][0].fill_(1e12),
    "a batch of 1e-30": lambda model, batch: batch["x"].mul_(1e-30),
}


def sweep_rules(tally: Tally) -> None:
    """Check plans that follow a wrong rule."""
    for index, (name, (function, pattern)) in enumerate(RULES.items()):
        _define(name, function)
        sw.register_rule(f"wrong::{name}", pattern)
        tally.wrong.setdefault("rules", []).append(True)  # all of them couple rows
        for setup, change in RULE_SETUPS.items():
            torch.manual_seed(0)
            model, batch = Ruled(name).double(), {"x": torch.randn(6, 4, dtype=torch.float64)}
            plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
            change(model, batch)
            try:
                accepted = sw.verify(model, batch, plan).ok
            except ShardwiseError:
                tally.refused("rules", setup, [Mutant(name, None)])
                continue
            tally.add("rules", setup, f"rule: {name} as {pattern}", index, accepted=accepted)


# ------------------------------------------------ wrong collectives


def choices() -> Iterator[CollectiveChoice]:
    """Yield solved collectives of two to five ranks."""
    model, batch = build()
    graph = sw.capture(model, batch)
    for ranks in (2, 3, 4, 5):
        cluster = sw.Cluster.local(ranks)
        for strategy in ("ddp", "fsdp"):
            plan = getattr(sw.strategies, strategy)(graph, cluster)
            yield from sw.collectives.choose(plan, cluster, use="solved").collectives


def tree_mutants(choice: CollectiveChoice) -> Iterator[tuple[str, CollectiveChoice]]:
    """Yield choices with a broken tree."""
    forest = choice.forests[0]
    last = forest.trees[-1]
    small = replace(last, weight=0.03)
    others = (*forest.trees[:-1], replace(last, weight=last.weight - 0.03))

    def made(trees: Sequence[Tree]) -> CollectiveChoice:
        return replace(choice, forests=(replace(forest, trees=tuple(trees)),))

    for half in ("inward", "outward"):
        yield (
            f"small tree without its {half} half",
            _try(made, (*others, replace(small, **{half: ()}))),
        )
        yield (
            f"tree without its {half} half",
            _try(made, (*forest.trees[:-1], replace(last, **{half: ()}))),
        )
    yield ("half a weight", _try(made, (*forest.trees[:-1], replace(last, weight=last.weight / 2))))
    yield "a missing tree", _try(made, forest.trees[1:])
    yield "a duplicate tree", _try(made, (*forest.trees, last))
    for half in ("inward", "outward"):
        parents = list(getattr(last, half))
        if len(parents) > 2:
            leaf = next(r for r, p in enumerate(parents) if p >= 0 and r not in parents)
            parents[leaf] = leaf
            yield (
                f"a disconnected rank {half}",
                _try(made, (*others, replace(small, **{half: tuple(parents)}))),
            )


def _try(made: Callable[[Sequence[Tree]], CollectiveChoice], trees: Sequence[Tree]) -> Any:
    try:
        return made(trees)
    except ShardwiseError as error:
        return error


def sweep_trees(tally: Tally) -> None:
    """Check broken trees of collectives."""
    for choice in choices():
        verify_trees(choice)
        for index, (name, broken) in enumerate(tree_mutants(choice)):
            wrong = isinstance(broken, Exception) or not _carries_all(broken)
            tally.wrong.setdefault("trees", []).append(wrong)
            try:
                if isinstance(broken, Exception):
                    raise broken
                verify_trees(broken)
                accepted = True
            except ShardwiseError:
                accepted = False
            place = len(tally.wrong["trees"]) - 1
            what = f"{choice.operation} of {len(choice.groups[0])}: {name}"
            tally.add("trees", "unchanged", f"tree {index}: {what}", place, accepted=accepted)


def _carries_all(choice: CollectiveChoice) -> bool:
    """Return whether the numeric results of a choice are correct."""
    forest, operation = choice.forests[0], choice.operation
    if not abs(sum(tree.weight for tree in forest.trees) - 1) < 1e-3:
        return False
    ranks, count = forest.num_ranks, 210
    counts = () if operation == "all_reduce" else (count,) * ranks
    try:
        program = lowered(
            forest, operation, ranks * count, item_bytes=8, chunk_bytes=512, counts=counts
        )
        return _is_correct(program.program(ranks * count))
    except (ShardwiseError, ValueError, IndexError):
        return False


def _is_correct(program: MessageProgram) -> bool:
    rng, numel, ranks = np.random.default_rng(0), program.numel, program.num_ranks
    data = [rng.standard_normal(numel) for _ in range(ranks)]
    total = np.sum(data, axis=0)
    ends = np.cumsum((0, *program.counts)) if program.counts else None
    if program.operation == "all_gather":
        assert ends is not None
        inputs = [w[a:b] for w, a, b in zip(data, ends, ends[1:], strict=False)]
        expected = [np.concatenate(inputs)] * ranks
    else:
        inputs, expected = data, [total] * ranks
        if ends is not None:
            expected = [total[a:b] for a, b in itertools.pairwise(ends)]
    try:
        results = interpret(program, inputs)
    except (ShardwiseError, ValueError, KeyError):
        return False
    return all(
        a is not None and a.shape == b.shape and np.allclose(a, b)
        for a, b in zip(results, expected, strict=True)
    )


def sweep_messages(tally: Tally) -> None:
    """Check message programs with lost messages, wrong operations or short chunks."""
    for choice in choices():
        forest, ranks = choice.forests[0], choice.forests[0].num_ranks
        counts = () if choice.operation == "all_reduce" else (12,) * ranks
        options: dict[str, Any] = {"item_bytes": 8, "chunk_bytes": 64, "counts": counts}
        program = lowered(forest, choice.operation, 12 * ranks, **options).program(12 * ranks)
        check_messages(program)
        for name, change in MESSAGES.items():
            try:
                broken: Any = change(program)
            except ShardwiseError:
                broken = None
            if broken == program:
                continue
            tally.wrong.setdefault("messages", []).append(broken is None or not _is_correct(broken))
            accepted = broken is not None
            try:
                if broken is not None:
                    check_messages(broken)
            except ShardwiseError:
                accepted = False
            place = len(tally.wrong["messages"]) - 1
            what = f"messages: {choice.operation} of {ranks}: {name}"
            tally.add("messages", "unchanged", what, place, accepted=accepted)


def _with(program: MessageProgram, rank: int, steps: Any) -> MessageProgram:
    lists = list(program.instructions)
    lists[rank] = tuple(steps)
    return replace(program, instructions=tuple(lists))


def _lost(program: MessageProgram) -> MessageProgram:
    """Remove a message at its sender and receiver."""
    for source, steps in enumerate(program.instructions):
        for index, step in enumerate(steps):
            if step.kind != "send":
                continue
            received = list(program.instructions[step.peer])
            place = next(
                i
                for i, other in enumerate(received)
                if other.kind != "send" and other.peer == source and other.first == step.first
            )
            del received[place]
            shorter = _with(program, source, (*steps[:index], *steps[index + 1 :]))
            return _with(shorter, step.peer, received)
    return program


def _kind(before: str, after: str) -> Callable[[MessageProgram], MessageProgram]:
    def change(program: MessageProgram) -> MessageProgram:
        for rank, steps in enumerate(program.instructions):
            for index, step in enumerate(steps):
                if step.kind == before:
                    other = step._replace(kind=after)
                    return _with(program, rank, (*steps[:index], other, *steps[index + 1 :]))
        return program

    return change


def _dropped(kind: str) -> Callable[[MessageProgram], MessageProgram]:
    def change(program: MessageProgram) -> MessageProgram:
        for rank, steps in enumerate(program.instructions):
            for index, step in enumerate(steps):
                if step.kind == kind:
                    return _with(program, rank, (*steps[:index], *steps[index + 1 :]))
        return program

    return change


def _shorter_chunk(program: MessageProgram) -> MessageProgram:
    first, *others = program.chunks
    return replace(program, chunks=(first._replace(stop=first.stop - 1), *others))


MESSAGES: dict[str, Callable[[MessageProgram], MessageProgram]] = {
    "a lost message": _lost,
    "a sum that is a copy": _kind("reduce", "receive"),
    "a copy that is a sum": _kind("receive", "reduce"),
    "a missing send": _dropped("send"),
    "a missing receive": _dropped("receive"),
    "a missing sum": _dropped("reduce"),
    "a short chunk": _shorter_chunk,
}


# ------------------------------------------------ counts


class Tally:
    """The wrong mutants, and the results of the verifier for all setups."""

    def __init__(self) -> None:
        self.wrong: dict[str, list[bool]] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.accepted: list[str] = []
        self.alarms: list[str] = []
        self.strict: list[str] = []

    def known(self, kind: str) -> bool:
        return kind in self.wrong

    def add(self, kind: str, setup: str, name: str, index: int, *, accepted: bool) -> None:
        wrong = self.wrong[kind][index]
        label = "wrong" if wrong else "equivalent"
        self.counts[label, "accepted" if accepted else "rejected"] += 1
        if wrong and accepted:
            self.accepted.append(f"{kind}, {setup}: {name}")
        if not wrong and not accepted:
            self.strict.append(f"{kind}, {setup}: {name}")

    def refused(self, kind: str, setup: str, mutants: Sequence[Mutant]) -> None:
        """Count mutants with data that is not finite, with which nothing is certified."""
        self.counts["any", "refused"] += len(mutants)

    def false_alarm(self, what: str) -> None:
        self.alarms.append(what)

    def to_json(self) -> dict[str, Any]:
        return {
            "mutants": {
                kind: {"wrong": sum(wrong), "equivalent": len(wrong) - sum(wrong)}
                for kind, wrong in self.wrong.items()
            },
            "checks": {f"{a}, {b}": n for (a, b), n in sorted(self.counts.items())},
            "wrong and accepted": self.accepted,
            "right and rejected": self.alarms,
            "equivalent and rejected": self.strict,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweeps and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = (*STRATEGIES, "rules", "trees", "messages")
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    tally = Tally()
    for kind in options.only:
        if kind in STRATEGIES:
            sweep_programs(kind, tally)
        else:
            {"rules": sweep_rules, "trees": sweep_trees, "messages": sweep_messages}[kind](tally)
        print(kind, json.dumps(tally.to_json()["checks"]), flush=True)
    text = json.dumps(tally.to_json(), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 1 if tally.accepted or tally.alarms else 0


if __name__ == "__main__":
    sys.exit(main())
