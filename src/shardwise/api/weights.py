"""Initial weights: every rank begins with the same ones.

Enters: the user's model, which on some ranks may be on meta, and this rank's `ParameterStore`.
Leaves: nothing; the store is filled.

Ranks compare checksums of all parameters and buffers. What is equal on all ranks is copied from
each rank's own model. What differs, as it does where models are built without a seed, or is missing
on some ranks, comes from the first rank that has it, block by block: no rank needs more memory for
it than `BLOCK_BYTES`, or one row. What no rank has is initialized (`initialize.py`).
"""

from __future__ import annotations

import logging
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import runtime as rt
from shardwise.errors import ShardwiseError
from shardwise.frontend import skeleton

BLOCK_BYTES = 64 << 20
_DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=lambda dtype: str(dtype)
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a tensor's initial values come from.

    `owner` is the first place on the axis of all ranks that has them, None if there is none. The
    tensor `travels` if a rank that stores it has other values or none.
    """

    name: str
    owner: int | None
    dtype: torch.dtype | None
    travels: bool


def load_weights(model: nn.Module, store: rt.ParameterStore, seed: int) -> None:
    """Fill the store with the same initial weights on every rank; all ranks call it."""
    everyone = store.mesh.everyone
    named = dict((*model.named_parameters(), *model.named_buffers()))
    names = list(named)
    rows = [_described(name, named[name], store) for name in names]
    sources = _sources(names, rt.gather_rows(everyone, rows, store.device), everyone.ranks)
    if any(source.travels for source in sources) and everyone.index == 0:
        differing = [source.name for source in sources if source.travels]
        log.info(
            "initial values of %d of %d parameters and buffers differ between ranks or are missing "
            "on some; all ranks take those of rank %d (%s, …)",
            len(differing), len(names), everyone.ranks[0], differing[0],
        )  # fmt: skip
    for source in sources:
        if source.owner is None:
            continue
        if source.travels:
            _stream(source, named[source.name], store)
        elif store.holds(source.name):
            store.load_full(source.name, named[source.name].detach())
    missing = {source.name for source in sources if source.owner is None}
    if missing:
        with torch.random.fork_rng(devices=[]):
            _initialize(model, store, {name for name in missing if store.holds(name)}, seed)


def _described(name: str, tensor: Tensor, store: rt.ParameterStore) -> list[int]:
    """What the other ranks must know: number type (-1: no data), bits, NaNs, whether it is used."""
    used = int(store.holds(name))
    if tensor.is_meta:
        return [-1, 0, 0, used]
    alone = store.mesh.everyone.size == 1
    bits = 0 if alone else int(rt.checksum(tensor))
    undefined = tensor.is_floating_point() and bool(torch.isnan(tensor.detach()).any())
    return [_DTYPES.index(tensor.dtype), bits, int(undefined), used]


def _sources(
    names: list[str], every: list[list[list[int]]], ranks: tuple[int, ...]
) -> list[Source]:
    """Decide where each tensor comes from, the same on every rank."""
    sources = []
    for place, name in enumerate(names):
        rows = [rank_rows[place] for rank_rows in every]
        owner = next((i for i, (dtype, *_) in enumerate(rows) if dtype >= 0), None)
        if owner is None:
            sources.append(Source(name=name, owner=None, dtype=None, travels=False))
            continue
        dtype, bits, undefined, _ = rows[owner]
        if undefined:
            raise ShardwiseError(
                f"parameter or buffer {name} has NaNs on rank {ranks[owner]}",
                where=name,
                hint="load or initialize the weights before parallelize",
            )
        travels = any(used and row[:2] != [dtype, bits] for *row, _, used in rows)
        sources.append(Source(name=name, owner=owner, dtype=_DTYPES[dtype], travels=travels))
    return sources


@torch.no_grad()
def _stream(source: Source, tensor: Tensor, store: rt.ParameterStore) -> None:
    """Give all ranks the owner's values, block by block."""
    everyone, shape = store.mesh.everyone, tuple(tensor.shape)
    assert source.owner is not None
    assert source.dtype is not None
    width = math.prod(shape[1:]) * source.dtype.itemsize
    count = max(1, BLOCK_BYTES // max(width, 1))
    length = shape[0] if shape else 1
    for begin in range(0, length, count):
        block = (min(count, length - begin), *shape[1:]) if shape else ()
        if everyone.index == source.owner:
            rows = tensor.detach().narrow(0, begin, block[0]) if shape else tensor.detach()
            rows = rows.to(store.device).contiguous()
        else:
            rows = torch.empty(block, dtype=source.dtype, device=store.device)
        everyone.broadcast(_bytes_of(rows), source.owner).wait()
        if store.holds(source.name):
            store.load_rows(source.name, begin, rows)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which every backend can send."""
    flat = tensor.view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


def _initialize(model: nn.Module, store: rt.ParameterStore, known: set[str], seed: int) -> None:
    """Initialize one module after the other, in order, and keep this rank's parts.

    A module's numbers follow from the seed and its path, so that a rank which holds some of the
    modules gives them the same values as any other.
    """
    twin = skeleton(model)
    real = dict(model.named_modules())
    done: set[str] = set()
    for path, module in twin.named_modules():
        own = [
            (f"{path}.{leaf}" if path else leaf, leaf)
            for leaf in (*module._parameters, *module._buffers)
        ]
        wanted = [(name, leaf) for name, leaf in own if name in known and name not in done]
        if not wanted:
            continue
        given = _real_tensors(real[path])
        if len(given) < len(wanted):
            module.to_empty(device="cpu", recurse=False)
            torch.manual_seed(_seed_of(path, seed))
            _reset(twin, module, path)
        for name, leaf in wanted:
            tensor = given.get(leaf)
            store.load_full(name, getattr(module, leaf).detach() if tensor is None else tensor)
            done.add(name)
        module.to_empty(device="meta", recurse=False)


def _seed_of(path: str, seed: int) -> int:
    return zlib.crc32(f"{seed} {path}".encode())


def _real_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module that already have values."""
    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    return {k: t.detach() for k, t in tensors.items() if t is not None and not t.is_meta}


@torch.no_grad()
def _reset(model: nn.Module, module: nn.Module, path: str) -> None:
    """The module's own initialization: `reset_parameters`, or the model's `_init_weights`."""
    reset = getattr(module, "reset_parameters", None)
    initialize = getattr(model, "_init_weights", None)
    if initialize is not None:
        initialize(module)
    elif reset is not None:
        reset()
    else:
        raise ShardwiseError(
            f"{type(module).__name__} has parameters on meta and no reset_parameters()",
            where=path or "the model",
            hint="define reset_parameters() on it, or build the model with weights",
        )
