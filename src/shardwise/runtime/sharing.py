"""What each group of ranks has, on all ranks: state dicts of a model that lies in stages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.mesh import Axis, ProcessMesh
from shardwise.runtime.parameters import torch_dtype

__all__ = ["share"]


def share(
    mesh: ProcessMesh,
    groups: Sequence[tuple[int, ...]],
    mine: Mapping[str, Tensor | None],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor | None]:
    """The tensors of all groups, by name; each group's ranks hold the same ones. All ranks call it.

    A name that several groups have is taken from the first.
    """
    if len(groups) == 1:
        return dict(mine)
    everyone, rank = mesh.everyone, mesh.ranks[mesh.rank]
    found: dict[str, Tensor | None] = {}
    for ranks in groups:
        root = everyone.ranks.index(ranks[0])
        names = _share_list(everyone, root, _described(mine) if rank in ranks else None, device)
        same: dict[int, Tensor] = {}
        for name, shape, dtype, number in names:
            if shape is None:
                found.setdefault(name, None)
                continue
            if number not in same:
                held = mine[name] if rank in ranks else None
                whole = (
                    torch.empty(shape, dtype=torch_dtype(dtype), device=device)
                    if held is None
                    else held.detach().contiguous()
                )
                same[number] = everyone.broadcast(whole, root).wait()
            found.setdefault(name, same[number])
    return found


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


def _share_list(
    everyone: Axis, root: int, rows: list[list[object]] | None, device: torch.device | str
) -> list[Any]:
    """The list of the axis' rank `root`, on all of its ranks."""
    text = json.dumps(rows).encode() if rows is not None else b""
    length = everyone.broadcast(torch.tensor([len(text)], device=device), root).wait()
    data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if rows is not None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    data = everyone.broadcast(data, root).wait()
    found: list[Any] = json.loads(bytes(data.cpu().numpy()))
    return found
