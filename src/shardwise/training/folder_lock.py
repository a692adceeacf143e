"""One training at a time in a run's folder.

Two of them would cut each other's logs and delete each other's checkpoints. The lock is the
system's own on a small file: it ends with the process, however that ends, so that a killed training
is resumed at once; and processes that the training forked do not hold it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError, TrainingError
from shardwise.files import parse_json, writing

__all__ = ["NAME", "locked_folder"]

NAME = "run.lock"
_BUSY = (errno.EACCES, errno.EAGAIN)
_held: dict[str, int] = {}  # file -> process: the system's locks do not keep one from itself


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock inside; a `TrainingError` names who has it."""
    path = folder / NAME
    key = os.path.realpath(path)
    # Opening and closing the file once more would give this process's own lock back.
    if _held.get(key) == os.getpid():
        raise _in_use(folder, {"host": platform.node(), "pid": os.getpid()})
    with writing(path, TrainingError, hint="folder: a folder that you may write to"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _take(handle):
            raise _in_use(folder, _holder(handle))
        _held[key] = os.getpid()
        yield
    finally:
        _held.pop(key, None)
        os.close(handle)  # which gives the lock back


def _take(handle: int) -> bool:
    """Take the lock and note who has it; False if another process has it."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        # A file system without locks: the note in the file is all there is.
        if _is_alive(_holder(handle)):
            return False
    note = {"host": platform.node(), "pid": os.getpid(), "since": time.time()}
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its note
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(note).encode(), 0)
    return True


def _holder(handle: int) -> dict[str, Any]:
    try:
        found = parse_json(os.pread(handle, 4096, 0), where=NAME)
    except (OSError, ShardwiseError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process of a note runs; of other hosts that is not known."""
    pid = holder.get("pid")
    if holder.get("host") != platform.node() or not isinstance(pid, int) or pid == os.getpid():
        return False
    return Path(f"/proc/{pid}").exists()


def _in_use(folder: Path, holder: dict[str, Any]) -> TrainingError:
    since = ""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
    return TrainingError(
        f"{folder} is in use: process {holder.get('pid', '?')} on {holder.get('host', '?')} "
        f"trains in it{since}",
        where="folder",
        hint="another folder, or wait until that training has ended",
    )
