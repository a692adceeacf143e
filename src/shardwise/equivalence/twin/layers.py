"""Fewer layers: of blocks that are the same up to their weights, the first two are kept.

Enters: a `Graph`, nodes to keep (where a stage begins) with the blocks they are in, and what a plan
says of a block. Leaves: a `Graph` with fewer nodes and parameters, and what was left out. A use of
a dropped block's value becomes a use of the same value of the block of its kind that was kept last
before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shardwise.ir import Buffer, Graph, Node, Ref, iter_refs, map_refs

Said = Callable[[str, Sequence[Node]], str]  # of a block's path and nodes

KEPT = 2
DEEPEST = 3  # numbered modules inside numbered modules


def drop_layers(
    graph: Graph, keep: Collection[str] = (), said: Said | None = None
) -> tuple[Graph, tuple[str, ...]]:
    """The graph with `KEPT` blocks of each kind, at every depth of numbered modules.

    Blocks with a node in `keep` stay, too. Blocks of which something else is `said` are of another
    kind.
    """
    small, notes, _ = fold_layers(graph, keep, said)
    return small, notes


def fold_layers(
    graph: Graph, keep: Collection[str] = (), said: Said | None = None
) -> tuple[Graph, tuple[str, ...], dict[str, str]]:
    """As `drop_layers`, and for each node that is gone the one that stands for it."""
    notes: list[str] = []
    stands: dict[str, str] = {}
    for depth in range(1, DEEPEST + 1):
        graph, more, instead = _drop_at(graph, depth, keep, said)
        stands = {gone: instead.get(other, other) for gone, other in stands.items()} | instead
        notes += more
    return graph, tuple(notes), stands


def kinds_of_blocks(
    graph: Graph, depth: int, said: Said | None = None
) -> tuple[dict[str, list[Node]], dict[str, dict[str, str]]]:
    """The nodes of every block at a depth; for each parent the kinds of its blocks, as text."""
    blocks: dict[str, list[Node]] = {}
    for node, path in zip(graph.nodes, _homes(graph, depth), strict=True):
        if path is not None:
            blocks.setdefault(path, []).append(node)
    owners = {p.value: p.name for p in graph.parameters}
    owners |= {b.value: b.name for b in graph.buffers}
    parents: dict[str, dict[str, str]] = {}
    for path, nodes in blocks.items():
        kind = _signature(graph, path, nodes, owners) + (said(path, nodes) if said else "")
        parents.setdefault(path.rpartition(".")[0], {})[path] = kind
    return blocks, parents


def _drop_at(
    graph: Graph, depth: int, keep: Collection[str], said: Said | None
) -> tuple[Graph, list[str], dict[str, str]]:
    homes = _homes(graph, depth)
    blocks, parents = kinds_of_blocks(graph, depth, said)
    asked = {h for node, h in zip(graph.nodes, homes, strict=True) if node.name in keep and h}
    renamed: dict[str, str] = {}
    stands: dict[str, str] = {}
    dropped: set[str] = set()
    texts: list[str] = []
    for parent, kinds in parents.items():
        chosen = _chosen(kinds, asked)
        for path, other in chosen.items():
            if path != other:
                dropped.add(path)
                for mine, theirs in zip(blocks[path], blocks[other], strict=True):
                    renamed |= dict(zip(mine.outputs, theirs.outputs, strict=True))
                    stands[mine.name] = theirs.name
        left = len(set(chosen.values()))
        texts += [f"{parent}: {len(kinds)} layers -> {left}"] * (left < len(kinds))
    if not dropped:
        return graph, [], {}
    small = _without(graph, [home not in dropped for home in homes], renamed)
    return small, texts, stands


def _chosen(kinds: Mapping[str, str], asked: Collection[str]) -> dict[str, str]:
    """For every block of a parent, the one that stands for it: itself, or one kept before it.

    What follows a dropped block is given to what follows its substitute; a block is kept where
    that would pass over another kept one.
    """
    paths = list(kinds)
    kept = {p for i, p in enumerate(paths) if p in asked or _earlier(paths, kinds, i) < KEPT}
    while True:
        last: dict[str, str] = {}
        found: dict[str, str] = {}
        newest = ""
        for index, path in enumerate(paths):
            if path in kept:
                last[kinds[path]] = newest = path
            found[path] = last[kinds[path]]
            following = paths[index + 1] if index + 1 < len(paths) else None
            if found[path] != newest and (following is None or following in kept):
                kept.add(path)
                break
        else:
            return found


def _earlier(paths: list[str], kinds: Mapping[str, str], index: int) -> int:
    """How many blocks of the same kind stand before one."""
    return sum(kinds[path] == kinds[paths[index]] for path in paths[:index])


def _homes(graph: Graph, depth: int) -> list[str | None]:
    """The block of every node.

    Where a model keeps a block's layers in a container and writes its code in the enclosing module,
    what follows a block's first node up to the next block's belongs to it; the last block's end is
    as long as the others'.
    """
    homes = [_block_path(node.module, depth) for node in graph.nodes]
    spans: dict[str, tuple[int, int]] = {}
    for index, path in enumerate(homes):
        if path is not None:
            spans[path] = (spans.get(path, (index, 0))[0], index + 1)
    ordered = sorted(spans.items(), key=lambda item: item[1])
    if any(h not in (None, path) for path, span in ordered for h in homes[slice(*span)]):
        return homes
    if all(None not in homes[slice(*span)] for _, span in ordered):
        return homes
    tail: list[str] = []
    for (path, (first, last)), following in zip(ordered, [*ordered[1:], None], strict=True):
        end = last
        if following is not None and following[0].rpartition(".")[0] == path.rpartition(".")[0]:
            end = following[1][0]
            tail = [node.op for node in graph.nodes[last:end]]
        elif tail and [node.op for node in graph.nodes[last : last + len(tail)]] == tail:
            end = last + len(tail)
        homes[first:end] = [path] * (end - first)
    return homes


def _block_path(module: str, depth: int) -> str | None:
    """The module's path up to its numbered piece at this depth."""
    pieces = module.split(".")
    numbered = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    return ".".join(pieces[: numbered[depth - 1] + 1]) if len(numbered) >= depth else None


def _signature(graph: Graph, path: str, nodes: list[Node], owners: Mapping[str, str]) -> str:
    """Text that is equal for blocks that differ only in weights and in what they are given."""
    names: dict[str, str] = {}

    def name(ref: Ref) -> str:
        owner = owners.get(ref.name, "")
        own = owner.removeprefix(f"{path}.") if owner.startswith(f"{path}.") else ""
        label = own or f"from{len(names)}"
        return f"{names.setdefault(ref.name, label)}: {graph.values[ref.name]}"

    lines = []
    for node in nodes:
        args = map_refs((node.args, node.kwargs), name)
        lines.append(
            f"{node.module.removeprefix(path)} {node.op} {args} {node.grad_enabled} {node.autocast}"
        )
        for out in node.outputs:
            names[out] = f"v{len(names)}"
            lines.append(f"{names[out]}: {graph.values[out]}")
    return "\n".join(lines)


def _without(graph: Graph, kept: list[bool], renamed: Mapping[str, str]) -> Graph:
    def rename(arg: Any) -> Any:
        return map_refs(arg, lambda ref: Ref(renamed.get(ref.name, ref.name)))

    nodes = [
        dataclasses.replace(node, args=rename(node.args), kwargs=rename(node.kwargs))
        for node, stays in zip(graph.nodes, kept, strict=True)
        if stays
    ]
    before = {name for node in graph.nodes for name in node.inputs}
    loss = renamed.get(graph.loss, graph.loss) if graph.loss else None
    outputs = rename(graph.outputs)
    used = {loss, *(ref.name for ref in iter_refs(outputs))}
    used |= {renamed.get(b.mutation, b.mutation) for b in graph.buffers if b.mutation}
    alive: set[str] = set()
    for node in reversed(nodes):
        if used.intersection(node.outputs) or not before.intersection(node.outputs):
            used |= set(node.inputs)  # what nothing used before stays, too
            alive.add(node.name)
    nodes = [node for node in nodes if node.name in alive]
    lost = before - {name for node in nodes for name in node.inputs}
    made = {name for node in nodes for name in node.outputs}
    buffers = [b for b in graph.buffers if b.value not in lost]
    parameters = tuple(p for p in graph.parameters if p.value not in lost)
    constants = tuple(c for c in graph.constants if c.value not in lost)
    made |= {i.value for i in graph.inputs} | {p.value for p in parameters}
    made |= {b.value for b in buffers} | {c.value for c in constants}
    return dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        values={n: t for n, t in graph.values.items() if n in made},
        parameters=parameters,
        buffers=tuple(_renamed_buffer(b, renamed) for b in buffers),
        constants=constants,
        loss=loss,
        outputs=outputs,
    )


def _renamed_buffer(buffer: Buffer, renamed: Mapping[str, str]) -> Buffer:
    mutation = buffer.mutation
    return dataclasses.replace(
        buffer, mutation=renamed.get(mutation, mutation) if mutation else None
    )
