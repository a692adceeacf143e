"""Work in a forked process: what it returned or raised, without what it did to this one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def in_child(work: Callable[[], Any]) -> str:
    """Run some work in a forked process; what it returned or raised, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    os.waitpid(pid, 0)
    return said
