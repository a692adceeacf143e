"""The head of a rank program's file: for whom it is, what it imports, holds and takes.

Enters: a `Program`, the part of some ranks, and the text of the classes below. Leaves: text.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.dtypes import dtype_name
from shardwise.emit.function import INDENT
from shardwise.emit.quote import comment, is_importable, literal
from shardwise.emit.specs import parameter_spec, splits_text
from shardwise.emit.wrap import wrap
from shardwise.ir import Graph
from shardwise.messages import CollectiveChoice
from shardwise.program import Program, RankProgram
from shardwise.version import __version__

WIDTH = 90


def head(
    program: Program,
    ranks: RankProgram,
    body: str,
    stage: int | None,
    names: Mapping[str, str],
) -> str:
    """Docstring, imports that `body` needs, and tables; `names` are those of user functions."""
    imports = _imports(body, names, program.graph.functions)
    tables = [wrap(line) for line in _tables(program, ranks)]
    return "\n".join([_docstring(program, ranks, stage), *imports, "", *tables])


def _docstring(program: Program, ranks: RankProgram, stage: int | None) -> str:
    plan, graph = program.plan, program.graph
    part = "" if stage is None else f"stage {stage} of "
    whose = comment(f"{part}{graph.name} on {plan.mesh}, plan {plan.name}")
    return (
        f'"""{whose}: {_places(program, ranks)}'
        f".\n\nWritten by shardwise {__version__} for the graph "
        f"{comment(graph.fingerprint)}.\nSafe to edit; verify it again afterwards.\n"
        f'{collectives_text(plan.collectives)}"""\n'
    )


def collectives_text(choices: Sequence[CollectiveChoice]) -> str:
    """Which collectives `parallelize` lets go another way than the library's, and how fast."""
    others = [choice for choice in choices if not choice.is_library]
    if not others:
        return ""
    texts = [comment(str(choice)) for choice in others]
    rows = [textwrap.wrap(text, WIDTH, subsequent_indent="    ") for text in texts]
    told = "\n".join(f"- {line}" if i == 0 else line for r in rows for i, line in enumerate(r))
    return f"\nOf plan.json; other collectives are the library's:\n{told}\n"


def _places(program: Program, ranks: RankProgram) -> str:
    """Whom the file is for: ranks, or ranks of a stage and micro-batches."""
    mesh, time = program.mesh, program.time_axis
    if time is None:
        return _numbers("rank", ranks.ranks)
    count = mesh.axis_size(time)
    size = mesh.size // count
    numbers = tuple(dict.fromkeys(place % size for place in ranks.ranks))
    batches = tuple(dict.fromkeys(place // size for place in ranks.ranks))
    if len(batches) == count:
        return _numbers("rank", numbers)
    return f"{_numbers('rank', numbers)}, {_numbers('micro-batch', batches)}"


def _numbers(what: str, numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"{what}{'s' * (len(numbers) > 1)} {shown}"


def _imports(body: str, names: Mapping[str, str], functions: Mapping[str, Any]) -> list[str]:
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    lines = ["import math\n"] if "math" in used else []
    lines += ["import torch"] if "torch" in used else []
    lines += ["import torch.nn.functional as F"] if "F" in used else []
    lines += ["from torch import nn"] if "nn" in used else []
    lines += ["from torch.utils.checkpoint import checkpoint"] if "checkpoint" in used else []
    lines += [""] if lines and lines[-1] else []
    lines += ["from shardwise import runtime as rt"]
    lines += [_function_import(op, name, functions.get(op)) for op, name in names.items()]
    return lines


def _function_import(op: str, name: str, cls: Any) -> str:
    """Import a user's `autograd.Function`; one that no import finds is handed in at load time."""
    if cls is not None and is_importable(cls.__module__, cls.__qualname__):
        renamed = "" if name == cls.__qualname__ else f" as {name}"
        return f"from {cls.__module__} import {cls.__qualname__}{renamed}"
    return f"{name} = FUNCTIONS[{literal(op)}]  # noqa: F821 - cannot be imported, handed in"


def _tables(program: Program, ranks: RankProgram) -> Iterator[str]:
    """What the module holds, takes and gives."""
    graph = program.graph
    yield from _table("PARAMETERS", [parameter_spec(s, program.plan) for s in ranks.parameters])
    yield from _table("BUFFERS", _buffer_specs(graph))
    yield "INPUTS = {"
    for item in ranks.inputs:
        if item.kind == "batch":
            yield f"{INDENT}{literal(item.name)}: {splits_text(item.layout)},"
    yield "}"
    for table, source in (("BEFOREHAND", "beforehand"), ("RECEIVED", "received")):
        names = tuple(i.name for i in ranks.inputs if i.kind == source)
        if names:
            yield f"{table} = {literal(names)}"
    held = {parameter.name for parameter in ranks.parameters}
    hooks = [comment(str(hook)) for hook in graph.hooks if hook.parameter in held]
    if hooks:
        yield from ("", "# parallelize runs these on complete gradients and hands them in:")
        yield from (f"# {hook}" for hook in hooks)
        yield 'HOOKS = FUNCTIONS["gradient hooks"]  # noqa: F821'
    if graph.sends:
        yield f"SENT = {literal(graph.sends)}"


def _table(name: str, rows: list[str]) -> list[str]:
    return [f"{name} = (", *(f"{INDENT}{row}," for row in rows), ")"] if rows else [f"{name} = ()"]


def _buffer_specs(graph: Graph) -> list[str]:
    specs = []
    for buffer in graph.buffers:
        kind = graph.values[buffer.value]
        spec = (
            f"rt.BufferSpec(name={literal(buffer.name)}, shape={literal(kind.shape)}, "
            f'dtype="{dtype_name(kind.dtype)}"'
        )
        if buffer.aliases:
            spec += f", aliases={literal(buffer.aliases)}"
        if not buffer.persistent:
            spec += ", persistent=False"
        specs.append(f"{spec})")
    return specs
