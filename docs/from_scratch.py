"""A parallelizing compiler in one file: capture, layouts, lowering, code, verification.

python docs/from_scratch.py

It splits a model of two layers over any number of ranks, by itself, and shows that the result is
the same. It imports nothing of Shardwise, which does this for real models, several mesh axes and
devices; each part here says where its grown-up version is. Read it from top to bottom.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# 1. The model -----------------------------------------------------------------
# Written for one device. What it computes for a batch is, by definition, what every plan computes.


class MLP(nn.Module):
    """Two layers and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - y).pow(2).mean()


# 2. Capture -------------------------------------------------------------------
# (shardwise/frontend) A graph is a list of calls in order, each with its operands' names.


@dataclass(frozen=True, kw_only=True)
class Node:
    """One call: `linear_1 = linear(relu, p_down_weight, p_down_bias)`."""

    name: str
    op: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The captured step. The last node is the loss."""

    nodes: tuple[Node, ...]
    shapes: Mapping[str, tuple[int, ...]]
    parameters: Mapping[str, str]  # value -> name in the model
    inputs: tuple[str, ...]


def capture(model: nn.Module, batch: Mapping[str, Tensor]) -> Graph:
    """Follow one forward pass with torch.export."""
    exported = torch.export.export(model, (), dict(batch), strict=False)
    nodes: list[Node] = []
    shapes = {}
    for traced in exported.graph.nodes:
        if traced.op == "output":
            continue
        shapes[traced.name] = tuple(traced.meta["val"].shape)
        if traced.op == "call_function":
            op = traced.target.name().removeprefix("aten::").partition(".")[0]
            inputs = tuple(arg.name for arg in traced.args if isinstance(arg, torch.fx.Node))
            nodes += as_sum(Node(name=traced.name, op=op, inputs=inputs), shapes)
    signature = exported.graph_signature
    return Graph(
        nodes=tuple(nodes),
        shapes=shapes,
        parameters=dict(signature.inputs_to_parameters),
        inputs=tuple(signature.user_inputs),
    )


def as_sum(node: Node, shapes: dict[str, tuple[int, ...]]) -> list[Node]:
    """Return a mean as a sum over the count of the *full* tensor: a mean of means is wrong.

    Batch 7 on 3 ranks has parts of 3, 2 and 2 rows; each row still counts one seventh.
    """
    if node.op != "mean":
        return [node]
    (x,) = node.inputs
    share = f"{x}_share"
    shapes[share] = shapes[x]
    count = torch.Size(shapes[x]).numel()
    return [
        Node(name=share, op=f"mul 1/{count}", inputs=(x,)),
        replace(node, op="sum", inputs=(share,)),
    ]


# 3. Rules ---------------------------------------------------------------------
# (shardwise/sharding/rules) How may a call be sharded? One line per operator: letters are axes of
# the call. An axis that is missing in the result is summed over. `+n` is added to the result.

RULES = {
    "linear": "b k, n k, +n -> b n",
    "relu": "b n -> b n",
    "sub": "b n, b n -> b n",
    "pow": "b n -> b n",
    "mul": "b n -> b n",
    "sum": "b n ->",
}

# A value has one of these placements on the ranks, which also determines that of its gradient:
#
#   S(d)  sharded on dim d                         its gradient is sharded on dim d
#   R     replicated, used by the same work        its gradient is replicated
#   R~    replicated, used by different work       its gradient is partial
#   P     partial: each rank has a term of a sum   its gradient is replicated


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A choice for a call: the placements of its operands, and of its result."""

    name: str
    needs: tuple[str, ...]
    gives: str


def choices(node: Node) -> Iterator[Choice]:
    """Yield `same`, all of it on every rank, and `shard k`, a part of axis k on each."""
    left, _, right = RULES[node.op.split()[0]].partition("->")
    operands = [operand.strip() for operand in left.split(",")]
    result = right.split()
    yield Choice(name="same", needs=("R",) * len(operands), gives="R")
    for axis in sorted(set(left) - set(" ,+")):
        summed = axis not in result
        needs = []
        for operand in operands:
            letters = operand.strip("+").split()
            if axis in letters:
                needs.append(f"S({letters.index(axis)})")
            elif summed and operand.startswith("+"):
                needs.append("P")  # a bias counts once, not once per rank
            else:
                needs.append("R~")
        gives = "P" if summed else f"S({result.index(axis)})"
        yield Choice(name=f"shard {axis}", needs=tuple(needs), gives=gives)


# 4. Moves ---------------------------------------------------------------------
# (shardwise/runtime/redistribute.py) Between what a call gives and the next needs, data moves.
# Every move knows its backward: that is all that makes parallel training differentiable.
#
#   move     from → to   forward                  backward
#   gather   S  → R      put the parts together   take one's own part
#   slice    R  → S      take one's own part      put the parts together
#   reduce   P  → R      add up                   nothing
#   keep     R  → P      rank 0 keeps it, 0 else  nothing
#   fanout   R  → R~     nothing                  add up


def moves(have: str, need: str) -> list[str]:
    """Return the moves from one layout to another, by way of R."""
    if have == need:
        return []
    there = {"S": f"gather{have[1:]}", "P": "reduce", "R": ""}[have[0]]
    back = {"S": f"slice{need[1:]}", "P": "keep", "R~": "fanout", "R": ""}[
        need if need[0] == "R" else need[0]
    ]
    return [move for move in (there, back) if move]


def cost(move: str, elements: int, needs_gradient: bool) -> int:
    """Elements that a move sends, forward and backward; a sum travels twice."""
    forward = {"gather": 1, "reduce": 2}.get(move.partition("(")[0], 0)
    backward = {"slice": 1, "fanout": 2}.get(move.partition("(")[0], 0)
    return elements * (forward + backward * needs_gradient)


# 5. The plan ------------------------------------------------------------------
# (shardwise/planner) A choice for every call. All combinations are tried here; the real search is
# an integer program. A sent element costs as much as SEND multiply-adds.

SEND = 5
Plan = Mapping[str, Choice]


def find_plan(graph: Graph, ranks: int) -> Plan:
    """Return the combination of choices with the least work and communication."""
    options = [list(choices(node)) for node in graph.nodes]
    names = [node.name for node in graph.nodes]
    plans = (dict(zip(names, chosen, strict=True)) for chosen in product(*options))
    return min(plans, key=lambda plan: plan_cost(graph, plan, ranks))


def plan_cost(graph: Graph, plan: Plan, ranks: int) -> float:
    """Return the multiply-adds of one rank and the cost of its communication."""
    total = 0.0
    for node in graph.nodes:
        choice = plan[node.name]
        work = torch.Size(graph.shapes[node.name]).numel()
        if node.op == "linear":
            work *= graph.shapes[node.inputs[0]][-1]
        total += work if choice.name == "same" else work / ranks
        for value, need in zip(node.inputs, choice.needs, strict=True):
            elements = torch.Size(graph.shapes[value]).numel()
            for move in moves(stored_as(graph, plan, value, need), need):
                total += SEND * cost(move, elements, value not in graph.inputs)
    return total + 2 * SEND * (plan[graph.nodes[-1].name].gives == "P")


def stored_as(graph: Graph, plan: Plan, value: str, need: str) -> str:
    """Return the placement of a value before its use: parameters are stored sharded if used so."""
    if value in graph.parameters:
        return need if need.startswith("S") else "R"
    return plan[value].gives if value in plan else "R"


# 6. Lowering and code ---------------------------------------------------------
# (shardwise/program, shardwise/emit) Local calls with the moves between them, as Python source.

CODE = {
    "linear": "F.linear({0}, {1}, {2})",
    "relu": "F.relu({0})",
    "sub": "{0} - {1}",
    "pow": "{0} ** 2",
    "mul": "{0} * ({arg})",
    "sum": "{0}.sum()",
}


def emit(graph: Graph, plan: Plan) -> str:
    """Return the program of every rank."""
    lines = [f"def step(rank, p, {', '.join(graph.inputs)}):"]
    for node in graph.nodes:
        choice, operands = plan[node.name], []
        for value, need in zip(node.inputs, choice.needs, strict=True):
            text = f"p[{graph.parameters[value]!r}]" if value in graph.parameters else value
            for move in moves(stored_as(graph, plan, value, need), need):
                verb, _, dim = move.partition("(")
                text = f"rank.{verb}({text}{', ' + dim if dim else ')'}"
            operands.append(text)
        op, _, arg = node.op.partition(" ")
        call = CODE[op].format(*operands, arg=arg)
        lines += [f"    # {choice.name} -> {choice.gives}", f"    {node.name} = {call}"]
    loss = graph.nodes[-1].name
    partial = plan[loss].gives == "P"
    return "\n".join(
        [*lines, f"    return rank.reduce({loss})" if partial else f"    return {loss}"]
    )


# 7. Ranks ---------------------------------------------------------------------
# (shardwise/runtime) Here a rank is a thread, and a group is a row of slots with a barrier.


class Rank:
    """The functions that the program of one rank calls."""

    def __init__(self, index: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.index, self.slots, self.barrier = index, slots, barrier

    def all_ranks(self, local: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in order; all communication here goes through it."""
        self.slots[self.index] = local.detach()
        self.barrier.wait(timeout=10)
        tensors = [slot for slot in self.slots if slot is not None]
        self.barrier.wait(timeout=10)
        return tensors

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part; parts may be uneven."""
        return x.tensor_split(len(self.slots), dim)[self.index].clone()

    def full(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.all_ranks(x), dim)

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.all_ranks(x)).sum(0)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return Move.apply(x, lambda t: self.full(t, dim), lambda g: self.part(g, dim))

    def slice(self, x: Tensor, dim: int) -> Tensor:
        return Move.apply(x, lambda t: self.part(t, dim), lambda g: self.full(g, dim))

    def reduce(self, x: Tensor) -> Tensor:
        return Move.apply(x, self.sum, torch.clone)

    def keep(self, x: Tensor) -> Tensor:
        return Move.apply(x, torch.clone if self.index == 0 else torch.zeros_like, torch.clone)

    def fanout(self, x: Tensor) -> Tensor:
        return Move.apply(x, torch.clone, self.sum)


class Move(torch.autograd.Function):
    """A function with the backward that belongs to it."""

    @staticmethod
    def forward(ctx, x, forward: Callable, backward: Callable):
        ctx.move_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.move_back(grad), None, None


def run(source: str, graph: Graph, plan: Plan, model: nn.Module, batch, ranks: int):
    """Return the loss and gradients of every rank, each a thread."""
    scope = {"F": F}
    exec(source, scope)
    slots, barrier, results = [None] * ranks, threading.Barrier(ranks), [None] * ranks
    dims = sharded_dims(graph, plan)

    def work(index: int) -> None:
        rank = Rank(index, slots, barrier)
        parameters = {}
        for name, full in model.named_parameters():
            part = full.detach() if dims[name] is None else rank.part(full.detach(), dims[name])
            parameters[name] = part.clone().requires_grad_()
        loss = scope["step"](rank, parameters, **batch)
        loss.backward()
        results[index] = loss.detach(), {name: part.grad for name, part in parameters.items()}

    threads = [threading.Thread(target=work, args=(index,)) for index in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def sharded_dims(graph: Graph, plan: Plan) -> dict[str, int | None]:
    """Return the dim on which each parameter is sharded, or None."""
    dims = {}
    for node in graph.nodes:
        for value, need in zip(node.inputs, plan[node.name].needs, strict=True):
            if value in graph.parameters:
                dims[graph.parameters[value]] = int(need[2]) if need.startswith("S") else None
    return dims


# 8. Verification --------------------------------------------------------------
# (shardwise/equivalence) The emitted code is run, and everything is compared with the model.


def verify(source: str, graph: Graph, plan: Plan, model: nn.Module, batch, ranks: int) -> float:
    """Return the largest difference of a loss or a gradient, in float64."""
    model = model.double()
    batch = {name: value.double() for name, value in batch.items()}
    loss = model(**batch)
    expected = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(loss, model.parameters()),
            strict=True,
        )
    )
    results = run(source, graph, plan, model, batch, ranks)
    dims, worst = sharded_dims(graph, plan), 0.0
    for index, (rank_loss, gradients) in enumerate(results):
        worst = max(worst, (rank_loss - loss).abs().item())
        for name, gradient in gradients.items():
            full, dim = expected[name], dims[name]
            part = full if dim is None else full.tensor_split(ranks, dim)[index]
            worst = max(worst, (gradient - part).abs().amax().item() if part.numel() else 0.0)
    return worst


def main() -> None:
    """7 rows on 2 ranks, 100 on 3, and the first again with a fault."""
    torch.manual_seed(0)
    model = MLP()
    for rows, ranks in ((7, 2), (100, 3)):
        batch = {"x": torch.randn(rows, 6), "y": torch.randn(rows, 3)}
        graph = capture(model, batch)
        plan = find_plan(graph, ranks)
        source = emit(graph, plan)
        error = verify(source, graph, plan, model, batch, ranks)
        print(f"{source}\n# {rows} rows on {ranks} ranks: {'equal' if error < 1e-12 else error}\n")
        if "keep" in source:
            error = verify(source.replace("rank.keep", ""), graph, plan, model, batch, ranks)
            print(f"# without keep, a bias counts {ranks} times: off by {error:.2f}\n")


if __name__ == "__main__":
    main()
