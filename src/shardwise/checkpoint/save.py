"""Save a checkpoint on all ranks together: `save_checkpoint(path, module, optimizer)`.

Every rank writes its boxes into a hidden folder beside the final one, and a report of them. The
first rank joins the reports, writes `checkpoint.json` and renames the folder; until then, nothing
under the final name has changed. Each file and folder is synced before the next stage begins.
"""

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.box_io import local_portions
from shardwise.checkpoint.optimizer_state import Optimizers, each_optimizer
from shardwise.checkpoint.write import Staging, Writer, collect
from shardwise.errors import CheckpointError
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.rendezvous import open_rendezvous

TIMEOUT_S = 3600.0

_log = logging.getLogger("shardwise")


class Saving:
    """A save in progress.

    `blocked_s` is the time for which training was blocked so far, `duration_s` the total time, and
    `error` that of a failed save.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocked_s = 0.0
        self.duration_s = 0.0
        self._started_at = time.monotonic()
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete on all ranks; raise an error if it failed."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CheckpointError(f"{self.path} is not complete after {timeout_s:g} s")
        if self.error is not None:
            raise self.error
        return self.path

    def staged(self, timeout_s: float | None = None) -> None:
        """Wait until the state is copied; it may be changed from then on."""
        if self._staging is not None and not self._staging.finished.is_set():
            with self._blocking():
                if not self._staging.finished.wait(timeout_s):
                    raise CheckpointError(f"the state for {self.path} was not copied in time")

    def done(self) -> bool:
        """Return whether `wait` would return immediately."""
        return self._thread is None or not self._thread.is_alive()

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
            self.error = error
            if writer.rendezvous.rank == 0 and self._thread is not None:
                _log.error("checkpoint %s failed: %s", self.path, error)
        finally:
            self.duration_s = time.monotonic() - self._started_at

    def _start(self, writer: Writer, staging: Staging, optimizer: Any) -> None:
        self._staging = staging
        for single in each_optimizer(optimizer) if optimizer is not None else ():
            _block_next_step(single, self)
        # Not a daemon thread: a process that ends completes its checkpoint first.
        run = functools.partial(self._run, writer, staging)
        self._thread = threading.Thread(target=run, name="shardwise-save")
        self._thread.start()


_pending: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Saving]] = (
    weakref.WeakKeyDictionary()
)


def _block_next_step(optimizer: torch.optim.Optimizer, saving: Saving) -> None:
    """Make the optimizer's next step wait until the state is copied."""
    if optimizer not in _pending:  # the hook is never removed, which would race with other threads
        optimizer.register_step_pre_hook(_before_step)
    _pending.setdefault(optimizer, []).append(saving)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for saving in _pending.get(optimizer, []):
        saving.staged()
    _pending[optimizer] = []


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

    `module` is a parallel module, or a plain one that is the same on all ranks. `optimizer` may be
    a mapping of several optimizers with disjoint parameters. `extra` is any JSON value; that of
    rank 0 is saved. `copies` are further sets of tensors by parameter name, each sharded as the
    parameter on this rank: `{"ema": {name: tensor}}`. Without `frozen`, parameters that are not
    trained are left out; load such a checkpoint with `strict=False`.

    With `wait=False`, the checkpoint is written in the background; `saving.wait()` raises an error
    if it failed. The next step of the optimizer waits until the state is copied; without an
    optimizer, it is copied before this function returns. Call `saving.staged()` before changing
    parameters in any other way.

    If a rank fails or dies, the save fails on all ranks, which name it, and `path` is unchanged.
    """
    saving = Saving(Path(path))
    if isinstance(module, ParallelModule):
        with module.store.naming_failures("save a checkpoint"):
            pass  # ranks meet
    rendezvous = open_rendezvous("save", CheckpointError)
    with saving._blocking():
        try:
            contents = collect(
                module, optimizer, rendezvous.rank, step, extra or {}, copies or {}, frozen=frozen
            )
            portions = local_portions(contents.sections, rendezvous.rank)
            staging = Staging(portions, immediately=not wait and optimizer is None)
            target = Path(os.path.abspath(saving.path))
            writer = Writer(target, contents, portions, rendezvous, timeout_s)
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
