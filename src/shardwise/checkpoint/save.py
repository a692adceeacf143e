"""Writing a checkpoint: `save_checkpoint(path, module, optimizer)`, on all ranks together.

Every rank writes the boxes that fall to it into a hidden folder beside the final one, and a report
of what it wrote. The first rank joins the reports, writes `checkpoint.json` and renames the folder.
Until then, nothing under the final name has changed. Each file and folder is on the disk before
the next stage begins.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.optimizer_state import Optimizers, each_optimizer
from shardwise.checkpoint.transfer import portions
from shardwise.checkpoint.write import Contents, Staging, Writer, collect
from shardwise.errors import CheckpointError
from shardwise.runtime.rendezvous import Rendezvous, open_rendezvous

__all__ = ["Saving", "save_checkpoint"]


TIMEOUT_S = 3600.0

_log = logging.getLogger("shardwise")


class Saving:
    """A checkpoint that is being written.

    `blocked_s` is how long training was held up so far, `duration_s` how long all of it took.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocked_s = 0.0
        self.duration_s = 0.0
        self._begin = time.monotonic()
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete on all ranks; raises what failed."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CheckpointError(f"{self.path} is not complete after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self.path

    def staged(self, timeout_s: float | None = None) -> None:
        """Wait until the state is copied aside; from then on anyone may change it."""
        if self._staging is not None and not self._staging.finished.is_set():
            with self._blocking():
                if not self._staging.finished.wait(timeout_s):
                    raise CheckpointError(f"the state for {self.path} is not copied in time")

    def done(self) -> bool:
        """Whether `wait` would take no time."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What failed, once it is done."""
        return self._error

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.blocked_s += time.monotonic() - begin

    def _run(self, writer: Writer, staging: Staging) -> None:
        try:
            if staging is self._staging:
                staging.copy()
            writer.write(staging)
        except BaseException as error:
            staging.finished.set()
            writer.rendezvous.fail(error)
            self._error = error
            if writer.rendezvous.rank == 0 and self._thread is not None:
                _log.error("checkpoint %s failed: %s", self.path, error)
        finally:
            self.duration_s = time.monotonic() - self._begin

    def _start(self, writer: Writer, staging: Staging, optimizer: Any) -> None:
        self._staging = staging
        for each in each_optimizer(optimizer) if optimizer is not None else ():
            hold_step(each, self)
        # Not a daemon: a process that ends meanwhile completes its checkpoint first.
        work = functools.partial(self._run, writer, staging)
        self._thread = threading.Thread(target=work, name="shardwise-save")
        self._thread.start()


_held: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Saving]] = weakref.WeakKeyDictionary()


def hold_step(optimizer: torch.optim.Optimizer, saving: Saving) -> None:
    """Let the optimizer's next step wait until the state is copied aside."""
    if optimizer not in _held:  # the hook stays: it costs nothing, and has no thread to race with
        optimizer.register_step_pre_hook(_before_step)
    _held.setdefault(optimizer, []).append(saving)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for saving in _held.get(optimizer, []):
        saving.staged()
    _held[optimizer] = []


def save_checkpoint(
    path: str | Path,
    module: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    copies: Mapping[str, Mapping[str, Tensor]] | None = None,
    frozen: bool = True,
    wait: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Saving:
    """Write the state of a module and its optimizer to the folder `path`; all ranks call it.

    `module` is a parallel module, or a plain one that is the same on all ranks. Several optimizers
    on disjoint parameters are a mapping from names of your own. `extra` is JSON of
    your own, of which that of rank 0 is kept. `copies` are further sets of tensors by parameter
    name, each cut as the parameter is on this rank: `{"ema": {name: tensor}}`. Without `frozen`,
    parameters that are not trained are left out; `load_checkpoint(…, strict=False)` takes the rest.

    With `wait=False` it returns early, and `saving.wait()` says how it ended. Given an optimizer,
    its next step waits until the state is copied aside; else it is copied before this returns. Who
    changes parameters in another way calls `saving.staged()` first.

    A rank that fails or dies fails the save on all, which name it; what was at `path` stays.
    """
    saving = Saving(Path(path))
    rendezvous = open_rendezvous("save", CheckpointError)
    with saving._blocking():
        try:
            contents = collect(
                module, optimizer, rendezvous.rank, step, extra or {}, copies or {}, frozen=frozen
            )
            writer, staging = _prepare(
                saving.path, contents, rendezvous, timeout_s, wait, optimizer
            )
        except BaseException as error:
            rendezvous.fail(error)
            raise
        if wait:
            saving._run(writer, staging)
        else:
            saving._start(writer, staging, optimizer)
    if wait:
        saving.wait()
    return saving


def _prepare(
    path: Path,
    contents: Contents,
    rendezvous: Rendezvous,
    timeout_s: float,
    wait: bool,
    optimizer: Any,
) -> tuple[Writer, Staging]:
    mine = portions(contents.sections, rendezvous.rank)
    staging = Staging(mine, at_once=not wait and optimizer is None)
    return Writer(path, contents, mine, rendezvous, timeout_s), staging
