"""Initial weights: every rank begins with the same ones.

Enters: the user's model, which on some ranks may be on meta, and this rank's `ParameterStore`.
Leaves: nothing; the store is filled.

Ranks compare checksums of all parameters and buffers. What is equal on all ranks is copied from
each rank's own model. What differs, as it does where models are built without a seed, or is missing
on some ranks, comes from the first rank that has it, block by block: no rank needs more memory for
it than `BLOCK_BYTES`, or one row. What no rank has is initialized (`initialize.py`).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise import runtime as rt
from shardwise.api.initialize import initialize
from shardwise.errors import WeightsError
from shardwise.frontend.objective import as_module
from shardwise.ir import Graph
from shardwise.runtime.rendezvous import starting

Init = Callable[[], nn.Module] | Callable[[nn.Module], object]
BLOCK_BYTES = 64 << 20
BUILD_TIMEOUT_S = 1800.0
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


def load_weights(
    model: nn.Module,
    store: rt.ParameterStore,
    seed: int,
    init: Init | None = None,
    timeout_s: float = BUILD_TIMEOUT_S,
) -> None:
    """Fill the store with the same initial weights on every rank; all ranks call it.

    `init` gives weights to a model on meta. Without arguments it builds the model, on the first
    rank alone; with one it initializes the module it is given, on each rank that needs it.
    """
    everyone = store.mesh.everyone
    named = dict((*model.named_parameters(), *model.named_buffers()))
    names = list(named)
    rows = [_described(name, named[name], store) for name in names]
    numels = [tensor.numel() for tensor in named.values()]
    every = rt.gather_rows(everyone, rows, store.device)
    sources = _sources(names, numels, every, everyone.ranks)
    if everyone.index == 0 and any(source.travels for source in sources):
        differing = [source.name for source in sources if source.travels]
        log.info(
            "initial values of %d of %d parameters and buffers differ between ranks or are missing "
            "on some; all ranks take those of rank %d (%s, …)",
            len(differing), len(names), everyone.ranks[0], differing[0],
        )  # fmt: skip
    store.received_weights = any(source.travels for source in sources)
    for source in sources:
        if source.owner is None:
            continue
        if source.travels:
            _stream(source, named[source.name], store)
        elif store.holds(source.name):
            store.load_full(source.name, named[source.name].detach())
    missing = [source.name for source in sources if source.owner is None]
    if init is not None and not missing:
        raise WeightsError(
            "init was given, but the model has all of its weights",
            hint='leave init out, or build the model under torch.device("meta")',
        )
    if not missing:
        return
    if init is not None and _takes_nothing(init):
        _build(init, {name: named[name] for name in missing}, store, seed, timeout_s)
        return
    with torch.random.fork_rng(devices=[]):
        store.uninitialized = initialize(
            model,
            missing,
            [name for name in missing if store.holds(name)],
            seed,
            store.load_full,
            init,  # type: ignore[arg-type]  # it takes a module
        )


def constants_of(graph: Graph) -> dict[str, str]:
    """The checksums of tensors that forward reads and that are neither parameters nor buffers.

    They are not sent to other ranks, as they are captured with the program; ranks compare them.
    """
    found = {}
    for constant in graph.constants:
        user = next((node for node in graph.nodes if constant.value in node.inputs), None)
        where = user.origin if user is not None else "its outputs"
        shape = tuple(constant.data.shape)
        what = f"a tensor of shape {shape} that forward reads at {where} and that is no buffer"
        found[f"{what} (self.register_buffer would share rank 0's)"] = str(
            int(rt.checksum(constant.data))
        )
    return found


def _takes_nothing(init: Init) -> bool:
    """Whether `init` builds a model; otherwise it initializes the module it is given."""
    try:
        parameters = list(inspect.signature(init).parameters.values())
    except (TypeError, ValueError):  # of a builtin
        return True
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > 1:
        raise WeightsError(
            f"init takes {len(needed)} arguments: {', '.join(p.name for p in needed)}",
            hint="init=lambda: Model(config) builds the model; init=function initializes a module",
        )
    return not needed


def _build(
    init: Init, missing: Mapping[str, Tensor], store: rt.ParameterStore, seed: int, timeout_s: float
) -> None:
    """Let the first rank build the model with its weights, and give them to all."""
    everyone = store.mesh.everyone
    built: dict[str, Tensor] = {}
    with starting(max(timeout_s, BUILD_TIMEOUT_S)) as agree:
        if everyone.index == 0:
            with torch.random.fork_rng(), torch.device("cpu"):
                torch.manual_seed(seed)
                made = as_module(init())  # type: ignore[call-arg, arg-type]
            built = dict((*made.named_parameters(), *made.named_buffers()))
            for name, tensor in missing.items():
                _require_like(name, built.get(name), tensor)
        agree("built")
    for name, tensor in missing.items():
        source = Source(name=name, owner=0, dtype=tensor.dtype, travels=True)
        mine = built.pop(name, None)
        _stream(source, tensor if mine is None else mine.detach().to(tensor.dtype), store)


def _require_like(name: str, built: Tensor | None, wanted: Tensor) -> None:
    if built is None or built.shape != wanted.shape or built.is_meta:
        what = "no data" if built is not None and built.is_meta else "no counterpart"
        if built is not None and not built.is_meta:
            what = f"shape {tuple(built.shape)}"
        raise WeightsError(
            f"{name} has shape {tuple(wanted.shape)} in the model that was given to parallelize; "
            f"in the model that init builds it has {what}",
            where=name,
            hint="let init build the same model, with data (not on meta)",
        )


def _described(name: str, tensor: Tensor, store: rt.ParameterStore) -> list[int]:
    """What other ranks must know: dtype (-1: no data), checksum, NaNs, whether it is used."""
    used = int(store.holds(name))
    if tensor.is_meta:
        return [-1, 0, 0, used]
    alone = store.mesh.everyone.size == 1
    bits = 0 if alone else int(rt.checksum(tensor))
    undefined = int(torch.isnan(tensor.detach()).sum()) if tensor.is_floating_point() else 0
    return [_DTYPES.index(tensor.dtype), bits, undefined, used]


def _sources(
    names: list[str], numels: list[int], every: list[list[list[int]]], ranks: tuple[int, ...]
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
            raise WeightsError(
                f"{name} has {undefined} of {numels[place]} values that are NaN, on rank "
                f"{ranks[owner]}",
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
