"""Export a trained model for serving: `export(source, out)`.

Names and shapes of parameters are those of the model on one device, whatever plan trained it.
"""

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
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.batch import read_batch
from shardwise.checkpoint import convert_checkpoint, save_checkpoint
from shardwise.checkpoint.load import read_section
from shardwise.checkpoint.open import open_checkpoint
from shardwise.errors import ShardwiseError
from shardwise.files import write_text
from shardwise.frontend.errors import capture_error
from shardwise.frontend.tracing import quiet
from shardwise.runtime import ParallelModule
from shardwise.runtime.devices import barrier, process_rank
from shardwise.runtime.user_model import full_tensors

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
    """Write a trained model for serving to `out`; all ranks call it for a parallel module.

    `source` is a parallel module, a checkpoint folder (Shardwise or Hugging Face), or a plain
    model. If `out` ends in `.pt2`, `model` is filled with these weights and exported in eval mode,
    with `batch` as the example inputs; if `dynamic`, the first dim of tensors may vary where the
    model allows it. Any other `out` is a Hugging Face folder, and `config` the model's config as
    an object, a dict, or a file or folder that has it (default: that of `model`). Floating-point
    weights are converted to `dtype`; `section` selects weights of a checkpoint, such as "ema".
    """
    out = Path(out)
    if model is None and isinstance(source, nn.Module) and not isinstance(source, ParallelModule):
        model = source
    if out.suffix != PROGRAM:
        config = config if config is not None else getattr(model, "config", None)
        config = config.to_dict() if hasattr(config, "to_dict") else config
        _write_folder(source, out, config, dtype, section)
        return out
    if model is None or batch is None:
        raise ShardwiseError(
            "exporting a program needs the model and an example batch",
            hint=f'sw.export(…, "{out}", model=model, batch={{"input_ids": ids}})',
        )
    state = _weights(source, section)
    if process_rank() == 0:
        _write_program(_filled(model, state, dtype), batch, dynamic, out)
    barrier()
    return out


# ------------------------------------------------------------ a Hugging Face folder
def _write_folder(
    source: nn.Module | str | Path, out: Path, config: Any, dtype: torch.dtype | None, section: str
) -> None:
    temporary = out.with_name(f".{out.name}.weights")
    try:
        if isinstance(source, nn.Module):
            save_checkpoint(temporary, source)
        if process_rank() == 0:
            folder = temporary if isinstance(source, nn.Module) else Path(source)
            with _config_file(config, out) as file:
                convert_checkpoint(folder, out, to="hf", config=file, section=section, dtype=dtype)
    finally:
        if process_rank() == 0 and isinstance(source, nn.Module):
            shutil.rmtree(temporary, ignore_errors=True)
    barrier()


@contextlib.contextmanager
def _config_file(config: Any, out: Path) -> Iterator[Path | None]:
    """Yield the config as a file or folder; a dict is written to a temporary file."""
    if not isinstance(config, Mapping):
        yield None if config is None else Path(config)
        return
    path = out.with_name(f".{out.name}.config.json")
    write_text(path, json.dumps(dict(config), default=str), ShardwiseError)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------ a program
def _weights(source: nn.Module | str | Path, section: str) -> dict[str, Tensor]:
    """Return the full weights on rank 0."""
    if isinstance(source, ParallelModule):
        tensors = full_tensors(source)
        return {names[0]: tensor.cpu() for names, tensor in tensors if process_rank() == 0}
    if isinstance(source, nn.Module):
        return dict(source.state_dict())
    return read_section(open_checkpoint(source), section) if process_rank() == 0 else {}


def _filled(model: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of the model with these weights, in eval mode."""
    result, kind = copy.deepcopy(model), type(model).__name__
    before = result.state_dict()
    for name, tensor in state.items():
        if name in before and before[name].shape != tensor.shape:
            raise ShardwiseError(
                f"{name} has shape {tuple(tensor.shape)} in the weights, "
                f"{tuple(before[name].shape)} in {kind}",
                where=name,
                hint=_SAME_MODEL,
            )
    keys = result.load_state_dict(dict(state), strict=False, assign=True)
    tie_weights = getattr(result, "tie_weights", None)
    if callable(tie_weights):
        tie_weights()
    if keys.unexpected_keys:
        name = keys.unexpected_keys[0]
        raise ShardwiseError(
            f"the weights have {name}, which {kind} lacks", where=name, hint=_SAME_MODEL
        )
    after = result.state_dict(keep_vars=True)
    filled = {id(after[name]) for name in state if name in after}
    for name in keys.missing_keys:
        if id(after[name]) not in filled:  # not tied to one that is
            raise ShardwiseError(
                f"{kind} has {name}, which the weights lack", where=name, hint=_SAME_MODEL
            )
    for name, tensor in (*result.named_parameters(), *result.named_buffers()):
        if tensor.is_meta:
            raise ShardwiseError(
                f"{name} has no value: it is a meta tensor, and not among the weights",
                hint="a model that is not on the meta device",
            )
    return result.to(dtype).eval() if dtype is not None else result.eval()


def _write_program(model: nn.Module, batch: Any, dynamic: bool, out: Path) -> None:
    args, kwargs = read_batch(batch).arguments(batch, model)
    served = _with_plain_outputs(model)
    try:
        arguments = inspect.signature(served.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ShardwiseError(
            f"{type(model).__name__}.forward does not take this batch: {error}",
            hint="the inputs of forward for serving, as a dict or a tuple",
        ) from error
    shapes = pytree.tree_map(_dynamic_dims, dict(arguments)) if dynamic else None
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(served, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise capture_error(error, type(model).__name__) from error
    temporary = out.with_name(f".{out.stem}.partial{PROGRAM}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(program, temporary)
        os.replace(temporary, out)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the latter
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ShardwiseError(
            f"cannot write {out}: {reason}", where=str(out), hint="a folder that you may write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _dynamic_dims(leaf: Any) -> Any:
    """Let the first dim of a tensor vary, unless the model fixes it."""
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None


def _with_plain_outputs(model: nn.Module) -> nn.Module:
    """Make the model return tensors in dicts and tuples, which any process can load.

    Its class is replaced, rather than the model wrapped, to keep the names of parameters.
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
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
