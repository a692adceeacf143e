"""Progress of long work on the terminal: shown when it takes longer than two seconds.

Enters: a title and lines that replace each other. Leaves: a spinner on stderr of rank 0, if that is
a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

AFTER_S = 2.0


class Progress:
    """`with Progress("planning") as bar: bar.update("layouts for tp=4")`."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        first = os.environ.get("RANK", "0") == "0"
        self.title, self.shown = title, shown and first and sys.stderr.isatty()
        self.begun = time.monotonic()
        self._status: object = None

    def __enter__(self) -> Progress:
        return self

    def update(self, text: str) -> None:
        """Show what is being done."""
        if not self.shown or time.monotonic() - self.begun < AFTER_S:
            return
        from rich.console import Console
        from rich.status import Status

        if self._status is None:
            self._status = Status("", console=Console(stderr=True))
            self._status.start()
        passed = time.monotonic() - self.begun
        self._status.update(f"{self.title}: {text} ({passed:.0f} s)")  # type: ignore[attr-defined]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()  # type: ignore[attr-defined]
