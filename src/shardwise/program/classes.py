"""Places that run the same program: ranks of a mesh, and micro-batches, with equal local sizes.

Enters: `Resolved` and how sources are held. Leaves: classes of places, and rank programs without
repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.plans import Resolved
from shardwise.program.program import RankProgram
from shardwise.program.sources import Sources
from shardwise.shares import lengths, part


def merge_equal(programs: Iterable[RankProgram]) -> tuple[RankProgram, ...]:
    """Return the programs, with equal ones of several classes as one."""
    found: list[RankProgram] = []
    for program in programs:
        for index, known in enumerate(found):
            if replace(known, ranks=program.ranks) == program:
                found[index] = replace(known, ranks=(*known.ranks, *program.ranks))
                break
        else:
            found.append(program)
    return tuple(replace(p, ranks=tuple(sorted(p.ranks))) for p in found)


def rank_classes(resolved: Resolved, sources: Sources) -> list[tuple[int, ...]]:
    """Ranks with the same local sizes, in rank order."""
    mesh = resolved.plan.mesh
    extents: dict[str, set[int]] = {axis: set() for axis in mesh.names}
    layouts = [sources.layouts[name] for name in sources.layouts]
    for node in resolved.graph.nodes:
        layouts += [*resolved.operand_layouts(node.name), *resolved.result_layouts(node.name)]
    for layout in layouts:
        for axis, shard in layout.shards:
            extents[axis] |= {size for _, size, _ in shard.of}
    known: set[int] = set()
    for axis, ranks in mesh.axes:  # what earlier axes leave of an extent may be cut again
        extents[axis] |= known
        known |= {length for size in extents[axis] for length in lengths(size, ranks)}
    classes: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        key = tuple(
            tuple(part(size, ranks, place[axis])[1] for size in sorted(extents[axis]))
            for axis, ranks in mesh.axes
        )
        classes.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]
