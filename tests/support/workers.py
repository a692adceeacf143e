"""Distribute tests over the processes of pytest-xdist."""

from __future__ import annotations

from xdist.scheduler.loadfile import LoadFileScheduling


class ByFile(LoadFileScheduling):
    """Run the tests of a file in one process, and all tests with pools of ranks in the same one.

    Fixtures and pools are then created only once. Group marks would do the same, but pytest-xdist
    3.8 ignores them under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "distributed" if "distributed" in file.split("/") else file
