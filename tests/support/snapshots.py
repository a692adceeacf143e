"""Training that continues from snapshots in memory under another plan."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.checkpoint.memory import Snapshot, Snapshots, restore
from shardwise.equivalence.reference import KeepDouble
from tests.support.checkpoints import AFTER, BEFORE, Parallel, Run, start


def train_and_copy(setting: str, model_name: str) -> tuple[Run, Snapshot]:
    """Train some steps; return the state, and this rank's part of a snapshot of it."""
    with KeepDouble():
        run = start(setting, model_name)
        assert isinstance(run, Parallel)
        snapshots = Snapshots(run.module)
        snapshots.take(run.optimizer, step=0, extra={"seen": 0})
        losses = [run.step() for _ in range(BEFORE)]
        snapshot = snapshots.take(run.optimizer, step=BEFORE, extra={"seen": 7})
        return Run(losses, *run.state()), snapshot


def restore_each(
    setting: str, model_name: str, sources: list[list[list[Snapshot]]]
) -> list[tuple[Run, list[float]] | None]:
    """Restore from each source, the snapshots by rank; return the states and later losses."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    outcomes: list[tuple[Run, list[float]] | None] = []
    with KeepDouble():
        run = start(setting, model_name)
        assert isinstance(run, Parallel)
        for by_rank in sources:
            available = by_rank[rank] if rank < len(by_rank) else []
            loaded = restore(available, run.module, run.optimizer)
            if loaded is None:
                outcomes.append(None)
                continue
            tag, contents = loaded
            assert (tag, contents.step, contents.extra) == ((BEFORE, 0), BEFORE, {"seen": 7})
            state = Run([], *run.state())
            outcomes.append((state, [run.step() for _ in range(AFTER)]))
    return outcomes
