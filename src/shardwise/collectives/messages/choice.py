"""x"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.collectives.messages.program import MessageProgram, Ranks, format_steps, parse_ranks
from shardwise.errors import PlanError
from shardwise.formatting import short_seconds, short_size
from shardwise.schema import Form, OneOf, Range, Reader, Stored, Writer, check_fields


def _read_parents(text: str) -> tuple[int, ...]:
    return tuple(-1 if word == "-" else int(word) for word in text.split())


def _write_parents(parents: Sequence[int]) -> str:
    return " ".join("-" if parent < 0 else str(parent) for parent in parents)


Parents = Form(_read_parents, _write_parents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A part of the data: the parents along which it is summed to `root`, and copied from it.

    The root's parent is -1; a half that the operation does not need is empty.
    """

    weight: float
    root: int
    inward: Annotated[tuple[int, ...], Parents, Stored("in")] = ()
    outward: Annotated[tuple[int, ...], Parents, Stored("out")] = ()

    @property
    def edges(self) -> set[tuple[int, int]]:
        """The pairs of sender and receiver."""
        up = {(rank, parent) for rank, parent in enumerate(self.inward) if parent >= 0}
        return up | {(parent, rank) for rank, parent in enumerate(self.outward) if parent >= 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A send that trees use: its ends, the resources it occupies, and its latency."""

    source: int
    target: int
    uses: tuple[int, ...]
    latency_s: float


def _read_wires(sends: Mapping[str, str]) -> tuple[Wire, ...]:
    """Read wires by latency, as `0>1:0,5`: rank 0 sends to rank 1 over resources 0 and 5."""
    wires = []
    for latency, row in sends.items():
        for text in row.split():
            ends, _, uses = text.partition(":")
            source, _, target = ends.partition(">")
            used = tuple(int(use) for use in uses.split(",") if use)
            latency_s = float(latency)
            wires.append(
                Wire(source=int(source), target=int(target), uses=used, latency_s=latency_s)
            )
    return tuple(sorted(wires, key=lambda wire: (wire.source, wire.target)))


def _write_wires(wires: Sequence[Wire]) -> dict[str, str]:
    sends: dict[str, list[str]] = {}
    for wire in wires:
        uses = ",".join(map(str, wire.uses))
        sends.setdefault(repr(wire.latency_s), []).append(f"{wire.source}>{wire.target}:{uses}")
    return {latency: " ".join(row) for latency, row in sends.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The trees of one group of ranks, numbered from 0, and their wires.

    `capacity` is the bytes per second of each resource; `message_s` the time that a message costs
    a rank.
    """

    num_ranks: Annotated[int, Stored("ranks")]
    message_s: Annotated[float, Range(0), Stored(always=True)] = 0.0
    capacity: Annotated[
        tuple[Annotated[float, Range(0, above=True)], ...], Stored("capacity_bytes_per_s")
    ]
    wires: Annotated[
        tuple[Wire, ...], Form(_read_wires, _write_wires, Mapping[str, str]), Stored("sends")
    ]
    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        if not self.trees:
            raise PlanError("a forest without trees", hint="sw.collectives.choose(plan, cluster)")
        check_fields(self, PlanError)
        for wire in self.wires:
            outside = any(not 0 <= use < len(self.capacity) for use in wire.uses)
            if outside or not 0 <= wire.latency_s < math.inf:
                raise PlanError(
                    f"send {wire.source}>{wire.target} over {wire.uses} of {len(self.capacity)} "
                    f"resources with latency {wire.latency_s}"
                )
        known = {(wire.source, wire.target) for wire in self.wires}
        for number, tree in enumerate(self.trees):
            _check_tree(tree, number, self.num_ranks)
            missing = sorted(tree.edges - known)
            if missing:
                a, b = missing[0]
                raise PlanError(f"tree {number} sends {a}>{b}, for which there is no wire")


def _check_tree(tree: Tree, number: int, count: int) -> None:
    where = f"tree {number}"
    if not 0 <= tree.root < count or not 0 < tree.weight <= 1 + 1e-6:
        raise PlanError(
            f"{where}: root {tree.root} of {count} ranks, weight {tree.weight}",
            hint="weights above 0 that add up to 1",
        )
    for half in (tree.inward, tree.outward):
        if half and (len(half) != count or half[tree.root] != -1):
            raise PlanError(f"{where} is not one of {count} ranks with the root {tree.root}")
        for rank in range(len(half)):
            seen, at = 0, rank
            while at != tree.root and seen <= count:
                at, seen = half[at] if 0 <= half[at] < count else rank, seen + 1
            if seen > count:
                raise PlanError(f"{where}: rank {rank} does not lead to the root {tree.root}")


# Draw the trees of a program as text and as SVG. Chunks that take the same path share a picture:
# `reduce` arrows carry sums inward, `receive` arrows copies outward.


Edge = tuple[int, int]
SIDE, CIRCLE, DOT, GAP = 220, 78, 12, 14  # in pixels
COLORS = {"sums": "#b3541e", "copies": "#1f5f8b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """The edges of chunks that take the same path, in the order of their first messages."""

    chunks: tuple[int, ...]
    elements: int
    sums: tuple[Edge, ...]
    copies: tuple[Edge, ...]


def travels(program: MessageProgram) -> list[Travel]:
    """Return the paths of all chunks, those with the most elements first."""
    sums: dict[int, list[Edge]] = {}
    copies: dict[int, list[Edge]] = {}
    for rank, steps in enumerate(program.instructions):
        for step in steps:
            if step.kind != "send":
                edges_of_kind = sums if step.kind == "reduce" else copies
                for chunk in range(step.first, step.stop):
                    edges_of_kind.setdefault(chunk, []).append((step.peer, rank))
    same_path: dict[tuple[tuple[Edge, ...], tuple[Edge, ...]], list[int]] = {}
    for chunk in range(len(program.chunks)):
        key = (tuple(sorted(sums.get(chunk, ()))), tuple(sorted(copies.get(chunk, ()))))
        if key != ((), ()):
            same_path.setdefault(key, []).append(chunk)
    found_travels = [
        Travel(
            chunks=tuple(chunks),
            elements=sum(program.chunks[c].size for c in chunks),
            sums=inward,
            copies=outward,
        )
        for (inward, outward), chunks in same_path.items()
    ]
    return sorted(found_travels, key=lambda travel: -travel.elements)


def trees_text(program: MessageProgram, most: int = 16) -> str:
    """Return the paths as trees of ranks, at most `most` of them."""
    paths = travels(program)
    lines = []
    for travel in paths[:most]:
        share = travel.elements / max(program.numel, 1)
        lines.append(f"{share:.1%} of the elements, {len(travel.chunks)} chunks")
        for what, edges, towards in (
            ("sums, towards", [(b, a) for a, b in travel.sums], "<-"),
            ("copies, from", list(travel.copies), "->"),
        ):
            if edges and not _roots(edges):
                pairs = sorted({(min(edge), max(edge)) for edge in edges})
                exchanged = ", ".join(f"{a} and {b}" for a, b in pairs)
                lines.append(f"  {what.partition(',')[0]}, exchanged between {exchanged}")
            for root in _roots(edges):
                lines.append(f"  {what} rank {root}")
                lines += [f"    {line}" for line in _branches(root, edges, towards, "", set())]
    if len(paths) > most:
        lines.append(f"and {len(paths) - most} more paths")
    return "\n".join(lines)


def _roots(edges: list[Edge]) -> list[int]:
    """Return ranks that have no parent; empty where ranks exchange, as in recursive doubling."""
    return sorted({a for a, _ in edges} - {b for _, b in edges})


def _branches(
    root: int, edges: list[Edge], arrow: str, indent: str, seen: set[int]
) -> Iterator[str]:
    seen.add(root)
    children = [b for a, b in edges if a == root and b not in seen]
    for number, child in enumerate(children):
        last = number == len(children) - 1
        yield f"{indent}{'└' if last else '├'}{arrow} {child}"
        if child not in seen:
            yield from _branches(child, edges, arrow, indent + ("   " if last else "│  "), seen)


def svg(program: MessageProgram, most: int = 16) -> str:
    """Return the paths as arrows between ranks on circles."""
    paths = travels(program)[:most]
    columns = max(1, min(4, len(paths)))
    rows = -(-len(paths) // columns)
    width, height = columns * (SIDE + GAP) + GAP, rows * (SIDE + 2 * GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        "<defs>",
        *(
            f'<marker id="{name}" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0 L6 3 L0 6 z" fill="{color}"/></marker>'
            for name, color in COLORS.items()
        ),
        "</defs>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, travel in enumerate(paths):
        x = GAP + (number % columns) * (SIDE + GAP)
        y = GAP + (number // columns) * (SIDE + 2 * GAP)
        parts += _drawing(program, travel, x + SIDE / 2, y + SIDE / 2)
    return "\n".join([*parts, "</svg>", ""])


def _drawing(program: MessageProgram, travel: Travel, x: float, y: float) -> Iterator[str]:
    def place(rank: int, radius: float = CIRCLE) -> tuple[float, float]:
        angle = 2 * math.pi * rank / program.num_ranks - math.pi / 2
        return x + radius * math.cos(angle), y + radius * math.sin(angle)

    share = travel.elements / max(program.numel, 1)
    yield f'<text x="{x:.1f}" y="{y + SIDE / 2:.1f}">{share:.1%} of the elements</text>'
    for name, edges in (("sums", travel.sums), ("copies", travel.copies)):
        for a, b in edges:
            (x0, y0), (x1, y1) = place(a), place(b)
            length = max(math.hypot(x1 - x0, y1 - y0), 1.0)
            dx, dy = (x1 - x0) / length, (y1 - y0) / length
            # Beside the straight line, so that both directions between two ranks are visible.
            ox, oy = -dy * 3, dx * 3
            yield (
                f'<line x1="{x0 + dx * DOT + ox:.1f}" y1="{y0 + dy * DOT + oy:.1f}" '
                f'x2="{x1 - dx * DOT + ox:.1f}" y2="{y1 - dy * DOT + oy:.1f}" '
                f'stroke="{COLORS[name]}" marker-end="url(#{name})"/>'
            )
    for rank in range(program.num_ranks):
        cx, cy = place(rank)
        yield f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{DOT - 2}" fill="#eee" stroke="#555"/>'
        yield f'<text x="{cx:.1f}" y="{cy + 4:.1f}">{rank}</text>'


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")  # that a step repeats, with trees
IMPLEMENTATIONS = ("library", "hierarchical", "solved", "shared")  # shared: memory of one host
TIMED = (*IMPLEMENTATIONS, *(f"{name} measured" for name in IMPLEMENTATIONS))
REFERENCE_BYTES = 16 << 20  # at which times are compared in a plan's text
RankRanges = Annotated[Ranks, Form(parse_ranks, format_steps)]
Seconds = Annotated[float, Range(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChoice:
    """The implementation that `operation` uses on `groups`, which all run it at the same time.

    Data of fewer than `min_bytes` use the library. `predicted_s` are the seconds of each
    implementation for `REFERENCE_BYTES`; with the one that is used, b bytes take
    `latency_s + b * s_per_byte`. There is a forest for each group, or one for all.
    """

    operation: Annotated[str, OneOf(OPERATIONS)]
    groups: tuple[RankRanges, ...]
    uses: Annotated[str, OneOf(IMPLEMENTATIONS), Stored(always=True)] = "library"
    predicted_s: Annotated[
        Mapping[Annotated[str, OneOf(TIMED, "implementation")], Seconds], Stored(always=True)
    ] = field(default_factory=dict)
    min_bytes: Annotated[int, Range(0), Stored(always=True)] = 0
    latency_s: Annotated[float, Range(0), Stored(always=True)] = 0.0
    s_per_byte: Annotated[float, Range(0), Stored(always=True)] = 0.0
    chunk_bytes: Annotated[int, Range(0), Stored(always=True)] = 0
    forests: Annotated[tuple[Forest, ...], Stored(always=True)] = ()

    def __post_init__(self) -> None:
        check_fields(self, PlanError)
        sizes = {len(group) for group in self.groups}
        if len(sizes) != 1 or min(sizes) < 2 or any(len(set(g)) != len(g) for g in self.groups):
            raise PlanError(
                f"groups {format_groups(self.groups)} do not all have the same number of ranks, "
                "two or more"
            )
        if not self.has_trees:
            if self.forests:
                raise PlanError(f"{self.uses} has no trees", hint="leave forests out")
            return
        if len(self.forests) not in (1, len(self.groups)):
            raise PlanError(f"{len(self.forests)} forests for {len(self.groups)} groups")
        if any(forest.num_ranks != len(self.groups[0]) for forest in self.forests):
            raise PlanError(f"a forest is not of the {len(self.groups[0])} ranks of a group")
        if self.chunk_bytes < 1:
            raise PlanError(f"chunks of {self.chunk_bytes} bytes", hint="1 or more")

    @property
    def is_library(self) -> bool:
        return self.uses == "library"

    @property
    def has_trees(self) -> bool:
        """Whether it is a message program."""
        return self.uses in ("hierarchical", "solved")

    @property
    def gain(self) -> float:
        """The fraction of the library's time that it saves for data of the reference size."""
        if self.is_library or not self.predicted_s.get("library"):
            return 0.0
        return 1 - self.predicted_s.get(self.uses, 0.0) / self.predicted_s["library"]

    def seconds(self, num_bytes: float) -> float | None:
        """Return the time of data that do not use the library; None if they use it."""
        if self.is_library or num_bytes < self.min_bytes:
            return None
        return self.latency_s + num_bytes * self.s_per_byte

    def forest(self, ranks: Ranks) -> Forest | None:
        """Return the trees of one group; None if it has none."""
        if not self.has_trees or ranks not in self.groups:
            return None
        return self.forests[0 if len(self.forests) == 1 else self.groups.index(ranks)]

    # ------------------------------------------------------------ files and text

    def to_json(self) -> dict[str, Any]:
        omitted = set() if self.has_trees else {"chunk_bytes", "forests"}
        if self.is_library:
            omitted |= {"min_bytes", "latency_s", "s_per_byte"}
        fields = Writer().fields(self)
        return {name: value for name, value in fields.items() if name not in omitted}

    @staticmethod
    def from_json(data: Any, where: str) -> CollectiveChoice:
        """Read what `to_json` wrote, or an edited one."""
        choice: CollectiveChoice = Reader(PlanError, where).read(CollectiveChoice, data)
        return choice

    @property
    def way(self) -> str:
        """What is used, in words: `solved from 64 KiB on, 2 trees, chunks of 1 MiB`."""
        told = self.uses
        if not self.is_library and self.min_bytes:
            told += f" from {short_size(self.min_bytes)} on"
        if self.has_trees:
            trees = max(len(forest.trees) for forest in self.forests)
            told += f", {trees} trees, chunks of {short_size(self.chunk_bytes)}"
        return told

    def __str__(self) -> str:
        times = ", ".join(f"{way} {short_seconds(s)}" for way, s in self.predicted_s.items())
        told = f"{self.operation} on ranks {format_groups(self.groups)}: {self.way}"
        return told + (f" ({short_size(REFERENCE_BYTES)}: {times})" if times else "")


def check_ranks(choices: Sequence[CollectiveChoice], num_ranks: int) -> None:
    """Raise if a choice names a rank outside the plan."""
    for i, choice in enumerate(choices):
        last = max(map(max, choice.groups))
        if last >= num_ranks:
            raise PlanError(
                f"rank {last} is outside a plan for {num_ranks} ranks", where=f"collectives[{i}]"
            )


Chooser = Callable[[str, NDArray[np.int64]], CollectiveChoice | None]


def chosen(choices: Sequence[CollectiveChoice]) -> Chooser:
    """Return a function that finds the choice of an operation on some groups, in any order."""
    known = {(c.operation, frozenset(c.groups)): c for c in choices}

    def choose(operation: str, groups: NDArray[np.int64]) -> CollectiveChoice | None:
        return known.get((operation, frozenset(tuple(row) for row in groups.tolist())))

    return choose


def format_groups(groups: Sequence[Ranks], most: int = 4) -> str:
    """Return groups of ranks as text, at most the first `most`.

    >>> format_groups([(0, 1), (2, 3)])
    '0-1 | 2-3'
    """
    shown = " | ".join(format_steps(group) for group in groups[:most])
    return shown + (f" | … {len(groups) - most} more" if len(groups) > most else "")
