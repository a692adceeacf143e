"""Who writes what, and who reads what: the planning of `torch.distributed.checkpoint`.

Which ranks have the same boxes follows from the plan of the model, so that every rank finds its own
`SavePlan` without asking. The first rank joins them (`join_plans`) with torch's planner, which also
drops what two stages wrote. Reading is planned by torch's resharding of boxes. What travels between
ranks and lies in files is JSON; torch's pickled metadata is never made.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.dtypes import dtype_name
from shardwise.errors import CheckpointError
from shardwise.training.checkpoint.boxes import Box, Placed, split_box
from shardwise.training.checkpoint.held import Held
from shardwise.training.checkpoint.manifest import StoredTensor
from shardwise.training.checkpoint.types import dtype_named

__all__ = ["BOX_BYTES", "Portion", "join_plans", "plan_of", "portions", "read_plan"]

BOX_BYTES = 32 << 20  # what has one checksum, and is read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """A box that this rank writes."""

    section: str
    held: Held
    placed: Placed


def portions(sections: Mapping[str, Iterable[Held]], rank: int) -> list[Portion]:
    """What this rank writes of what it holds: its share of what others hold as well.

    All holders have the same boxes in the same order, and so agree on the shares: the largest box
    goes to who has least so far.
    """
    by_holders: dict[tuple[int, ...], list[Portion]] = {}
    for section, tensors in sections.items():
        for held in tensors:
            found = by_holders.setdefault(held.holders, [])
            for placed in held.placed:
                found += [
                    Portion(section=section, held=held, placed=part)
                    for part in split_box(placed, BOX_BYTES)
                ]
    mine: list[Portion] = []
    for holders, found in by_holders.items():
        loads = [(0, number) for number in range(len(holders))]
        for portion in sorted(found, key=lambda p: -p.placed.view.nbytes):
            load, number = heapq.heappop(loads)
            heapq.heappush(loads, (load + portion.placed.view.nbytes, number))
            if holders[number] == rank:
                mine.append(portion)
    return mine


def plan_of(mine: Sequence[Portion]) -> SavePlan:
    """This rank's plan."""
    return SavePlan([_write_item(p.section, p.held, p.placed.box) for p in mine])


def _write_item(section: str, held: Held, box: Box) -> WriteItem:
    # Not the full name: a model may have an `ema.w` of its own.
    return _item(f"{section}:{held.name}", held.shape, held.dtype, box)


def _item(name: str, shape: Sequence[int], dtype: torch.dtype, box: Box) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(box),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(shape),
        ),
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))


def join_plans(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """All ranks' plans without repeats, after torch has checked that they make up all tensors."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    try:
        joined, _ = planner.create_global_plan(list(plans))
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' parts do not make up the model: {error}") from error
    return joined


def plan_to_json(plan: SavePlan) -> list[list[Any]]:
    """A plan as another rank can read it."""
    rows: list[list[Any]] = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, item
        kind = dtype_name(data.properties.dtype)
        box = [list(data.chunk.offsets), list(data.chunk.sizes)]
        rows.append([item.index.fqn, list(data.size), kind, *box])
    return rows


def plan_from_json(rows: Sequence[Sequence[Any]]) -> SavePlan:
    """The plan of another rank."""
    items = []
    for name, shape, kind, offset, size in rows:
        dtype = dtype_named(kind, str(name))
        items.append(_item(name, shape, dtype, Box(tuple(offset), tuple(size))))
    return SavePlan(items)


def read_plan(name: str, stored: StoredTensor, wanted: Sequence[Placed]) -> LoadPlan:
    """What to read of a stored tensor for the boxes wanted.

    In each item, `storage_index.index` counts the stored boxes and `dest_index.index` the wanted.
    """
    metadata = TensorStorageMetadata(
        properties=TensorProperties(dtype=stored.dtype),
        size=torch.Size(stored.shape),
        chunks=[_chunk(b.box) for b in stored.boxes],
    )
    chunks = [_chunk(placed.box) for placed in wanted]
    return LoadPlan(create_read_items_for_chunk_list(name, metadata, chunks))
