"""Hostile strings in emitted code stay text and change no statement."""

from __future__ import annotations

import ast
import keyword
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.collectives.messages import CollectiveChoice
from shardwise.emit.quote import RESERVED, comment, identifier, in_fstring, is_attribute, literal
from shardwise.errors import PlanError, ShardwiseError
from shardwise.ir import Graph

HOSTILE = (
    '"""\nimport os; os.system("touch /tmp/ran")\n"""',
    "'''\nraise SystemExit\n'''",
    'a"); __import__("os").system("id") #',
    "line\nraise SystemExit",
    "carriage\rraise SystemExit",
    "vertical\x0braise SystemExit\x0c",
    "next\x85raise SystemExit\u2028raise SystemExit\u2029",
    "ends with a backslash\\",
    '\\"""',
    "{__import__('os').system('id')}",
    "%s{0}{x!r}",
    "\u202eflipped\u202c",
    "null\0byte",
    "half a pair \ud800",
    "class",
    "self",
    "outputs",
    "block",
    "torch",
    "checkpoint",
    "ﬁ",
    "a b",
    "007",
    "²",
    "",
    "__init__",
    "__secret",
    "é中",
    "x" * 300,
)
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))
names = texts.map(lambda text: text.replace(".", "_") or "x")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))).square() + 1.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return (self.drop(x) - y).square().mean()


@cache
def captured() -> Graph:
    return sw.capture(Net(), {"x": torch.randn(4, 4), "y": torch.randn(4, 4)})


def statements(sources: Iterable[str]) -> Counter[str]:
    """Count calls, definitions and statements, regardless of names."""
    counts: Counter[str] = Counter()
    ignored = (ast.Attribute, ast.Subscript, ast.Constant, ast.Name, ast.expr_context)
    for source in sources:
        tree = ast.parse(source)
        counts.update(type(n).__name__ for n in ast.walk(tree) if not isinstance(n, ignored))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.name.isidentifier()
                assert not keyword.iskeyword(node.name)
    return counts


def renamed(graph: Graph, text: str, name: str) -> Graph:
    """Return the graph with a hostile text wherever a user's model may have one."""

    def path(module: str) -> str:
        return module.replace("inner", name)

    nodes = tuple(
        replace(n, module=path(n.module), module_class=text, source=text, source_text=text)
        for n in graph.nodes
    )
    parameters = tuple(
        replace(p, name=path(p.name), aliases=(f"{name}.alias",)) for p in graph.parameters
    )
    inputs = tuple(replace(i, name=name if i.name == "x" else i.name) for i in graph.inputs)
    return replace(
        graph,
        name=text,
        nodes=nodes,
        parameters=parameters,
        buffers=tuple(replace(b, name=f"{name}_buffer") for b in graph.buffers),
        inputs=inputs,
        module_classes={path(k): text for k in graph.module_classes},
        warnings=(text,),
    )


def emitted(graph: Graph, plan: sw.Plan) -> list[str]:
    plan = replace(plan, fingerprint=sw.strategies.ddp(graph, sw.Cluster.local(2)).fingerprint)
    return list(sw.compile(graph, plan).sources)


def plan_for(graph: Graph, kind: str) -> sw.Plan:
    cluster = sw.Cluster.local(2)
    if kind == "pipeline":
        return sw.strategies.pipeline(graph, cluster, pp=2, num_microbatches=2)
    return {"fsdp": sw.strategies.fsdp, "tensor": sw.strategies.tensor}[kind](graph, cluster)


@cache
def benign(kind: str) -> Counter[str]:
    graph = renamed(captured(), "Class", "inside")
    return statements(emitted(graph, plan_for(graph, kind)))


@pytest.mark.parametrize("kind", ["fsdp", "tensor", "pipeline"])
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(text=texts, name=names)
@example(text=HOSTILE[0], name="outputs")
@example(text=HOSTILE[7], name="block")
@example(text=HOSTILE[9], name='a"{b}')
@example(text="class", name="__secret")
def test_hostile_names_change_no_statement(kind: str, text: str, name: str) -> None:
    graph = renamed(captured(), text, name)
    try:
        plan = plan_for(graph, kind)
    except ShardwiseError:  # a plan's name must be a single line of text
        graph = replace(graph, name="Net")
        plan = plan_for(graph, kind)
    assert statements(emitted(graph, plan)) == benign(kind)


@settings(deadline=None, max_examples=200)
@given(st.one_of(texts, st.lists(texts, max_size=3).map(tuple), st.floats(), st.integers()))
def test_a_literal_evaluates_to_the_value(value: Any) -> None:
    tree = ast.parse(literal(value), mode="eval")
    assert not any(isinstance(n, ast.Call | ast.JoinedStr) for n in ast.walk(tree))
    if isinstance(value, str | tuple):
        assert ast.literal_eval(tree) == value


@settings(deadline=None, max_examples=200)
@given(texts)
def test_texts_cannot_escape_their_context(text: str) -> None:
    for source in (
        f'"""{comment(text)}"""',
        f'"""{comment(text)}\n{comment(text)}."""',
        f"pass  # {comment(text)}",
    ):
        (statement,) = ast.parse(source).body
        assert isinstance(statement, ast.Expr | ast.Pass)
        source.encode()
    formatted = ast.parse(f'f"{in_fstring(text)}"', mode="eval").body
    assert isinstance(formatted, ast.JoinedStr)
    assert eval(compile(ast.Expression(formatted), "", "eval"), {}) == text
    name = identifier(text)
    assert name.isidentifier()
    assert name.isascii()
    assert name not in RESERVED
    if is_attribute(text):
        assert f"attr={text!r}" in ast.dump(ast.parse(f"self.{text}"))


@settings(deadline=None, max_examples=100)
@given(texts)
def test_plans_reject_unknown_backends(text: str) -> None:
    row = {"operation": "all_reduce", "groups": ["0-1"], "uses": "library"}
    if text in ("library", "hierarchical", "solved", "shared"):
        return
    with pytest.raises(PlanError):
        CollectiveChoice.from_json({**row, "predicted_s": {text: 1.0}}, "plan")


AXES = (
    ("class", "lambda"),
    ("self", "rt"),
    ("torch", "forward"),
    ("training", "_parameters"),
    ("path", "constant_0", "mesh"),
    ("blocks", "inner"),
    ("__x", "axis_class", "class"),
)


@pytest.mark.parametrize(
    "axes",
    [
        ("rng", "class"),
        ("a", "b", "a_b"),
        *(pytest.param(axes, marks=pytest.mark.slow) for axes in AXES),
    ],
)
def test_any_axis_name_gives_code_that_runs(axes: tuple[str, ...]) -> None:
    """Try names that Python, torch or the model use, and ones whose combinations clash."""
    model, batch = Net().double(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    batch = {key: value.double() for key, value in batch.items()}
    graph = sw.capture(model, batch)
    # Two batch axes and one for parameters: some reductions are over combined axes.
    usual = ("dp", "tp", "ep")[: len(axes)]
    plan = sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2)
    if len(axes) == 3:
        plan = replace(
            plan,
            mesh=sw.Mesh.of(dp=2, ep=2, tp=2),
            roles={"dp": "batch", "ep": "batch", "tp": "parameters"},
        )
    new = dict(zip(usual, axes, strict=True))
    data = plan.to_json()
    data["mesh"] = {new[a]: n for a, n in data["mesh"].items()}
    data["roles"] = {new[a]: role for a, role in data["roles"].items()}
    for entry in data["parameters"].values():
        if "layout" in entry:
            entry["layout"] = {new[a]: cut for a, cut in entry["layout"].items()}
    data["nodes"] = {k: {new[a]: c for a, c in v.items()} for k, v in data["nodes"].items()}
    certificate = sw.verify(model, batch, sw.Plan.from_json(data))
    assert certificate, str(certificate)
