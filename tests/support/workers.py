"""Which of pytest-xdist's processes runs which tests."""

from __future__ import annotations

from xdist.scheduler.loadfile import LoadFileScheduling


class ByFile(LoadFileScheduling):
    """A file's tests run in one process, and all that use pools of ranks in the same one.

    What a file or a pool keeps is then made once. Marks of groups would say the same, but
    pytest-xdist 3.8 does not see them under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "distributed" if "distributed" in file.split("/") else file
