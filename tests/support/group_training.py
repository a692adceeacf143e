"""A training with loading processes in its own process group, for signals to all of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.training.processes import EXIT_STOPPED
from tests.support.trainer import Samples, fields


class Slow(Samples):
    """Samples that load slowly, so that a signal arrives while they are read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.01)
        return super().__getitem__(index)


def main(folder: Path) -> int:
    data = {"train": Slow(400), "evaluation": None, "workers": 2}
    with sw.Trainer(
        **fields(folder=str(folder), data=data, steps=100_000, lr_schedule=())
    ) as trainer:
        result = trainer.fit()
    return EXIT_STOPPED if result.stopped == "signal" else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
