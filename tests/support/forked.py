"""Run code in a forked process, without side effects on this one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def in_child(work: Callable[[], Any]) -> str:
    """Run a function in a forked process; return its result or exception as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text
