"""A trained model for serving: `export(source, out)`.

Names and shapes are those of one device,
whatever plan the model was trained under.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.batch import read_batch
from shardwise.checkpoint import convert_checkpoint, save_checkpoint
from shardwise.checkpoint.load import read_section
from shardwise.checkpoint.opening import open_checkpoint
from shardwise.errors import ShardwiseError
from shardwise.files import write_text
from shardwise.frontend.errors import capture_error
from shardwise.frontend.tracing import quiet
from shardwise.runtime import ParallelModule, share_lists
from shardwise.runtime.parameters import torch_dtype

__all__ = ["export", "whole_tensors"]


# Whole tensors out of a parallel module, one after the other.


def whole_tensors(parallel: ParallelModule, *, frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, whole, one after the other; all ranks go through it."""
    store, mesh = parallel.store, parallel.mesh
    entries = {
        e.spec.name: e for e in store.entries if not e.spec.borrowed and (frozen or e.trained)
    }
    mine = [[name, list(e.spec.shape), str(e.master)] for name, e in entries.items()]
    for spec in store.buffer_specs:
        if spec.persistent:
            mine.append([spec.name, list(spec.shape), str(store.buffers[spec.name].dtype)])
    seen: set[str] = set()
    here = mesh.ranks[mesh.rank]
    for ranks, table in zip(mesh.groups, share_lists(mesh, mine, store.device), strict=True):
        root = mesh.everyone.ranks.index(ranks[0])
        for name, shape, dtype in table:
            if name in seen:
                continue
            seen.add(name)
            if here in ranks:
                found = _whole(parallel, name)
            else:
                found = torch.empty(shape, dtype=torch_dtype(dtype), device=store.device)
            if len(mesh.groups) > 1:
                found = found.to(store.device).contiguous()
                found = mesh.everyone.broadcast(found, root).wait()
            yield name, found


def _whole(parallel: ParallelModule, name: str) -> Tensor:
    store = parallel.store
    if name in store.buffers:
        return store.buffers[name].clone()
    entry = store.entry(name)
    value, piece = store.stored(entry)
    return store.gather_full(entry, value, piece=piece)


PROGRAM = ".pt2"
_SAME_MODEL = "the model that was trained, with the same sizes"


def export(
    source: nn.Module | str | Path,
    out: str | Path,
    *,
    model: nn.Module | None = None,
    batch: Any = None,
    dynamic: bool = True,
    dtype: torch.dtype | None = None,
    config: Any = None,
    section: str = "model",
) -> Path:
    """Write a trained model for serving to `out`; of a parallel module, all ranks call it.

    `source` is a parallel module, a checkpoint's folder (ours or Hugging Face's), or a plain model.
    For `out.pt2`, a program of `model`, which the source's weights are of, is exported in eval mode
    on `batch`; the first dim of its tensors may then change, if `dynamic` and the model allows it.
    Any other `out` is a Hugging Face folder; `config` is the model's, as an object, a dict, or a
    file or folder with it, by default that of `model`. `dtype` is that of floating-point weights,
    `section` the set of a checkpoint's weights to take, such as "ema".
    """
    out = Path(out)
    if model is None and isinstance(source, nn.Module) and not isinstance(source, ParallelModule):
        model = source
    if out.suffix != PROGRAM:
        _write_folder(source, out, _config_of(config, model), dtype, section)
        return out
    if model is None or batch is None:
        raise ShardwiseError(
            "a program is exported from a model and an example of its inputs",
            hint=f'sw.export(…, "{out}", model=model, batch={{"input_ids": ids}})',
        )
    state = _weights(source, section)
    if _is_first():
        _write_program(_filled(model, state, dtype), batch, dynamic, out)
    _meet()
    return out


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


# --- a Hugging Face folder ---------------------------------------------------------------------


def _write_folder(
    source: nn.Module | str | Path, out: Path, config: Any, dtype: torch.dtype | None, section: str
) -> None:
    aside = out.with_name(f".{out.name}.weights")
    try:
        if isinstance(source, nn.Module):
            save_checkpoint(aside, source)
        if _is_first():
            folder = aside if isinstance(source, nn.Module) else Path(source)
            with _config_file(config, out) as file:
                convert_checkpoint(folder, out, to="hf", config=file, section=section, dtype=dtype)
    finally:
        if _is_first() and isinstance(source, nn.Module):
            shutil.rmtree(aside, ignore_errors=True)
    _meet()


def _config_of(given: Any, model: nn.Module | None) -> Any:
    found: Any = given if given is not None else getattr(model, "config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found


@contextlib.contextmanager
def _config_file(config: Any, out: Path) -> Iterator[Path | None]:
    """The config as a file or folder, written for the time being if it is a dict."""
    if not isinstance(config, Mapping):
        yield None if config is None else Path(config)
        return
    path = out.with_name(f".{out.name}.config.json")
    write_text(path, json.dumps(dict(config), default=str), ShardwiseError)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


# --- a program ---------------------------------------------------------------------------------


def _weights(source: nn.Module | str | Path, section: str) -> dict[str, Tensor]:
    """The whole weights on rank 0."""
    if isinstance(source, ParallelModule):
        found = whole_tensors(source)
        return {name: tensor.cpu() for name, tensor in found if _is_first()}
    if isinstance(source, nn.Module):
        return dict(source.state_dict())
    return read_section(open_checkpoint(source), section) if _is_first() else {}


def _filled(model: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model with these weights, in eval mode."""
    twin, kind = copy.deepcopy(model), type(model).__name__
    own = twin.state_dict()
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            raise ShardwiseError(
                f"{name} is {tuple(tensor.shape)} in the weights, {kind} has "
                f"{tuple(own[name].shape)}",
                where=name,
                hint=_SAME_MODEL,
            )
    result = twin.load_state_dict(dict(state), strict=False, assign=True)
    tie = getattr(twin, "tie_weights", None)
    if callable(tie):
        tie()
    if result.unexpected_keys:
        name = result.unexpected_keys[0]
        raise ShardwiseError(
            f"the weights have {name}, which {kind} lacks", where=name, hint=_SAME_MODEL
        )
    now = twin.state_dict(keep_vars=True)
    filled = {id(now[name]) for name in state if name in now}
    for name in result.missing_keys:
        if id(now[name]) not in filled:  # nor tied to one that is
            raise ShardwiseError(
                f"{kind} has {name}, which the weights lack", where=name, hint=_SAME_MODEL
            )
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if tensor.is_meta:
            raise ShardwiseError(
                f"{name} has no value: it is on meta, and not among the weights",
                hint="a model that is not on meta",
            )
    return twin.to(dtype).eval() if dtype is not None else twin.eval()


def _write_program(model: nn.Module, batch: Any, dynamic: bool, out: Path) -> None:
    args, kwargs = read_batch(batch).arguments(batch, model)
    served = _with_plain_outputs(model)
    try:
        given = inspect.signature(served.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ShardwiseError(
            f"{type(model).__name__}.forward does not take this batch: {error}",
            hint="the inputs of forward for serving, as a dict or a tuple",
        ) from error
    shapes = pytree.tree_map(_free, dict(given)) if dynamic else None
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(served, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise capture_error(error, type(model).__name__) from error
    aside = out.with_name(f".{out.stem}.partial{PROGRAM}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(program, aside)
        os.replace(aside, out)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the latter
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ShardwiseError(
            f"cannot write {out}: {why}", where=str(out), hint="a folder that you may write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _free(leaf: Any) -> Any:
    """The first dim may change, unless the model fixes it."""
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None


def _with_plain_outputs(model: nn.Module) -> nn.Module:
    """The model with outputs that any process can read: tensors in dicts and tuples.

    It is of a class of its own, so that the names of parameters stay as they are.
    """
    kind = type(model)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # type: ignore[union-attr]

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _plain(kind.forward(self, *args, **kwargs))

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (tuple, list)):
        return (
            [_plain(item) for item in value]
            if isinstance(value, list)
            else tuple(map(_plain, value))
        )
    return value
