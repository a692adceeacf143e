"""Gather what each pipeline stage's ranks hold, on all ranks, for state dicts of the full model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import torch_dtype

__all__ = ["share", "share_lists"]


def share(
    mesh: ProcessMesh,
    mine: Mapping[str, Tensor | None],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor | None]:
    """Return the tensors of all groups by name; ranks of a group hold the same. All ranks call it.

    A name that several groups have is taken from the first.
    """
    if len(mesh.groups) == 1:
        return dict(mine)
    everyone, rank = mesh.everyone, mesh.ranks[mesh.rank]
    tables = share_lists(mesh, _described(mine), device)
    result: dict[str, Tensor | None] = {}
    for ranks, names in zip(mesh.groups, tables, strict=True):
        root = everyone.ranks.index(ranks[0])
        same: dict[int, Tensor] = {}
        for name, shape, dtype, number in names:
            if shape is None:
                result.setdefault(name, None)
                continue
            if number not in same:
                held = mine[name] if rank in ranks else None
                full = (
                    torch.empty(shape, dtype=torch_dtype(dtype), device=device)
                    if held is None
                    else held.detach().to(device).contiguous()
                )
                same[number] = everyone.broadcast(full, root).wait()
            result.setdefault(name, same[number])
    return result


def share_lists(
    mesh: ProcessMesh, mine: Sequence[Any], device: torch.device | str = "cpu"
) -> list[list[Any]]:
    """Return the lists of all groups, as JSON transmits them; all ranks call it."""
    if len(mesh.groups) == 1:
        return [list(mine)]
    everyone, rank = mesh.everyone, mesh.ranks[mesh.rank]
    result = []
    for ranks in mesh.groups:
        root = everyone.ranks.index(ranks[0])
        text = json.dumps(list(mine)).encode() if rank in ranks else b""
        length = everyone.broadcast(torch.tensor([len(text)], device=device), root).wait()
        data = torch.zeros(int(length), dtype=torch.uint8, device=device)
        if rank in ranks:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        data = everyone.broadcast(data, root).wait()
        result.append(json.loads(bytes(data.cpu().numpy())))
    return result


def _described(tensors: Mapping[str, Tensor | None]) -> list[list[object]]:
    """Name, shape, type and number of every tensor; names of the same tensor share a number."""
    numbers: dict[int, int] = {}
    rows: list[list[object]] = []
    for name, tensor in tensors.items():
        if tensor is None:
            rows.append([name, None, "", -1])
            continue
        number = numbers.setdefault(id(tensor), len(numbers))
        rows.append([name, list(tensor.shape), str(tensor.dtype), number])
    return rows
