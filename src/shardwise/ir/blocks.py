"""Find the blocks that a model repeats, and fold a graph to two blocks of each kind.

A block is a numbered module: `layers.3` of `nn.ModuleList`. Everything that treats repeated layers
as one asks here: plan globs, recomputation units, emitted loops, folding for simulation and search,
and the small twin of a model that is verified in its place.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from shardwise.ir.graph import Graph, Node, Ref, drop_unused, iter_refs, map_refs

# Return the constraints on a block, given its path and its nodes, as text. Blocks with
# different constraints are not folded together.
ConstraintKey = Callable[[str, Sequence[Node]], str]

BLOCKS_PER_KIND = 2  # one shows what enters the first block, two show what passes between them
MAX_DEPTH = 3  # numbered modules inside numbered modules
MIN_BLOCK_NODES = 6  # smaller modules are not worth a separate class or gather

_NUMBER = re.compile(r"0|[1-9][0-9]*")  # as lists count; "007" is a name


# ---------------------------------------------------------------- paths
def is_number(name: str) -> bool:
    """Return whether one piece of a module path is an index into a list of modules."""
    return _NUMBER.fullmatch(name) is not None


def block_path(module: str, depth: int = 1) -> str | None:
    """Return a module's path up to its numbered piece at this depth, or None.

    >>> block_path("model.layers.0.mlp.experts.3")
    'model.layers.0'
    >>> block_path("model.layers.0.mlp.experts.3", depth=2)
    'model.layers.0.mlp.experts.3'
    """
    pieces = module.split(".")
    numbered = [i for i, piece in enumerate(pieces) if is_number(piece)]
    return ".".join(pieces[: numbered[depth - 1] + 1]) if len(numbered) >= depth else None


def block_glob(path: str) -> str:
    """Return a path with a star for the number of each numbered module above its last piece.

    >>> block_glob("model.layers.7.mlp.up.linear_0")
    'model.layers.*.mlp.up.linear_0'
    """
    *modules, last = path.split(".")
    return ".".join([*("*" if is_number(piece) else piece for piece in modules), last])


# ---------------------------------------------------------------- which block a step belongs to
def assign_blocks(ops: Sequence[str], modules: Iterable[str], depth: int = 1) -> list[str | None]:
    """Return the block of each step of a program, given every step's operator and module.

    A model may keep the layers of a block in a container and write the block's code in the
    enclosing module. Steps between those of one block therefore belong to it, and so do those up to
    the next block's first step. The last block's tail is taken to be as long as the others'.
    """
    blocks = [block_path(module, depth) for module in modules]
    ordered = sorted(block_spans(blocks).items(), key=lambda item: item[1])
    if any(b not in (None, path) for path, span in ordered for b in blocks[slice(*span)]):
        return blocks  # blocks are interleaved: the code between them belongs to none in particular
    if all(None not in blocks[slice(*span)] for _, span in ordered):
        return blocks
    tail: list[str] = []
    for (path, (first, last)), following in zip(ordered, [*ordered[1:], None], strict=True):
        end = last
        if following is not None and following[0].rpartition(".")[0] == path.rpartition(".")[0]:
            end = following[1][0]
            tail = list(ops[last:end])
        elif tail and list(ops[last : last + len(tail)]) == tail:
            end = last + len(tail)
        blocks[first:end] = [path] * (end - first)
    return blocks


def node_blocks(nodes: Sequence[Node], depth: int = 1) -> list[str | None]:
    """Return the block of each node."""
    return assign_blocks([n.op for n in nodes], [n.module for n in nodes], depth)


def block_spans(blocks: Sequence[str | None]) -> dict[str, tuple[int, int]]:
    """Return the first position of each block and the one after its last."""
    spans: dict[str, tuple[int, int]] = {}
    for index, path in enumerate(blocks):
        if path is not None:
            spans[path] = (spans.get(path, (index, 0))[0], index + 1)
    return spans


def large_blocks(graph: Graph) -> tuple[str, ...]:
    """Return the outermost blocks with several nodes, which ZeRO-3 gathers one at a time."""
    counts = Counter(block_path(node.module) for node in graph.nodes)
    return tuple(path for path, count in counts.items() if path and count >= MIN_BLOCK_NODES)


# ---------------------------------------------------------------- folding
def drop_blocks(
    graph: Graph, keep: Collection[str] = (), constraint_key: ConstraintKey | None = None
) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph with `BLOCKS_PER_KIND` blocks of each kind, and notes about the others.

    Blocks with a node in `keep` stay, too. Folding is repeated at every depth of numbered modules.
    """
    small, notes, _ = fold_blocks(graph, keep, constraint_key)
    return small, notes


def fold_blocks(
    graph: Graph, keep: Collection[str] = (), constraint_key: ConstraintKey | None = None
) -> tuple[Graph, tuple[str, ...], dict[str, str]]:
    """Fold as `drop_blocks`, and also map each dropped node to its substitute."""
    notes: list[str] = []
    substitutes: dict[str, str] = {}
    for depth in range(1, MAX_DEPTH + 1):
        graph, new_notes, new = _fold_at(graph, depth, keep, constraint_key)
        substitutes = {node: new.get(other, other) for node, other in substitutes.items()} | new
        notes += new_notes
    return graph, tuple(notes), substitutes


def block_kinds(
    graph: Graph, depth: int, constraint_key: ConstraintKey | None = None
) -> tuple[dict[str, list[Node]], dict[str, dict[str, str]]]:
    """Return the nodes of every block at a depth, and for each parent the kind of each block.

    A kind is text, equal for blocks that differ only in their weights.
    """
    blocks: dict[str, list[Node]] = {}
    for node, path in zip(graph.nodes, node_blocks(graph.nodes, depth), strict=True):
        if path is not None:
            blocks.setdefault(path, []).append(node)
    owners = {p.value: p.name for p in graph.parameters}
    owners |= {b.value: b.name for b in graph.buffers}
    parents: dict[str, dict[str, str]] = {}
    for path, nodes in blocks.items():
        kind = _signature(graph, path, nodes, owners)
        kind += constraint_key(path, nodes) if constraint_key else ""
        parents.setdefault(path.rpartition(".")[0], {})[path] = kind
    return blocks, parents


def _fold_at(
    graph: Graph, depth: int, keep: Collection[str], constraint_key: ConstraintKey | None
) -> tuple[Graph, list[str], dict[str, str]]:
    homes = node_blocks(graph.nodes, depth)
    blocks, parents = block_kinds(graph, depth, constraint_key)
    required = {h for node, h in zip(graph.nodes, homes, strict=True) if node.name in keep and h}
    renamed: dict[str, str] = {}
    substitutes: dict[str, str] = {}
    dropped: set[str] = set()
    notes: list[str] = []
    for parent, kinds in parents.items():
        substitute_blocks = _substitute_blocks(kinds, required)
        for path, other in substitute_blocks.items():
            if path != other:
                dropped.add(path)
                for node, substitute in zip(blocks[path], blocks[other], strict=True):
                    renamed |= dict(zip(node.outputs, substitute.outputs, strict=True))
                    substitutes[node.name] = substitute.name
        remaining = len(set(substitute_blocks.values()))
        if remaining < len(kinds):
            notes.append(f"{parent}: {len(kinds)} layers -> {remaining}")
    if not dropped:
        return graph, [], {}
    return _without(graph, [home not in dropped for home in homes], renamed), notes, substitutes


def _substitute_blocks(kinds: Mapping[str, str], required: Collection[str]) -> dict[str, str]:
    """Map every block of a parent to its substitute: itself, or an earlier block that remains.

    The block after a dropped one takes its input from the substitute. If that edge would skip
    another remaining block, the order of kinds would change: the dropped block remains, too.
    """
    paths = list(kinds)
    counts: Counter[str] = Counter()
    remaining = set(required).intersection(paths)
    for path in paths:
        if counts[kinds[path]] < BLOCKS_PER_KIND:
            remaining.add(path)
        counts[kinds[path]] += 1
    while True:
        last: dict[str, str] = {}
        substitutes: dict[str, str] = {}
        newest = ""
        for index, path in enumerate(paths):
            if path in remaining:
                last[kinds[path]] = newest = path
            substitutes[path] = last[kinds[path]]
            following = paths[index + 1] if index + 1 < len(paths) else None
            if substitutes[path] != newest and (following is None or following in remaining):
                remaining.add(path)
                break
        else:
            return substitutes


def _signature(graph: Graph, path: str, nodes: list[Node], owners: Mapping[str, str]) -> str:
    """Return text that is equal for blocks that differ only in weights and in their inputs."""
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


def _without(graph: Graph, remains: list[bool], renamed: Mapping[str, str]) -> Graph:
    """Return the graph of the remaining nodes and the sources they use, with renamed values."""

    def rename(arg: Any) -> Any:
        return map_refs(arg, lambda ref: Ref(renamed.get(ref.name, ref.name)))

    remaining = [
        dataclasses.replace(node, args=rename(node.args), kwargs=rename(node.kwargs))
        for node, stays in zip(graph.nodes, remains, strict=True)
        if stays
    ]
    loss = renamed.get(graph.loss, graph.loss) if graph.loss else None
    outputs = rename(graph.outputs)
    visible = (*graph.ends, *(ref.name for ref in iter_refs(graph.outputs)))
    nodes = drop_unused(graph, remaining, (renamed.get(name, name) for name in visible))
    unused = {n for node in graph.nodes for n in node.inputs}.difference(*(n.inputs for n in nodes))
    buffers = tuple(
        dataclasses.replace(b, mutation=renamed.get(b.mutation or "", b.mutation))
        for b in graph.buffers
        if b.value not in unused
    )
    parameters = tuple(p for p in graph.parameters if p.value not in unused)
    constants = tuple(c for c in graph.constants if c.value not in unused)
    sources: list[Any] = [*graph.inputs, *parameters, *buffers, *constants]
    defined = {source.value for source in sources}
    defined |= {name for node in nodes for name in node.outputs}
    return dataclasses.replace(
        graph,
        nodes=nodes,
        values={n: t for n, t in graph.values.items() if n in defined},
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        loss=loss,
        outputs=outputs,
    )
