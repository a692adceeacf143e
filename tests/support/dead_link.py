"""A rank that reduces until a link fails: `python -m tests.support.dead_link FOLDER RANK`.

Four ranks form a line. A rank writes RANK.ready after the first reduction, and RANK.error.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.collectives import Network, solve
from shardwise.errors import ShardwiseError
from shardwise.runtime.collectives.messenger import Messenger

RANKS, SIZE, TIMEOUT_S = 4, 500_000, 4.0


def line() -> Network:
    """Return the network 0 - 1 - 2 - 3 with links in both directions."""
    return Network.of_links(
        {edge: 5e7 for a in range(RANKS - 1) for edge in ((a, a + 1), (a + 1, a))}
    )


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    program = solve(line(), "all_reduce", SIZE).program
    messenger, data = Messenger(timeout_s=TIMEOUT_S), torch.ones(SIZE)
    messenger.run(program, data)
    (folder / f"{rank}.ready").touch()
    began = time.monotonic()
    try:
        while time.monotonic() < began + 60:
            began = time.monotonic()
            messenger.run(program, data)
        message = "nothing failed"
    except ShardwiseError as error:
        message = f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
    (folder / f"{rank}.writing").write_text(message)
    (folder / f"{rank}.writing").rename(folder / f"{rank}.error")
    time.sleep(2 * TIMEOUT_S)  # the other ranks must detect the failure themselves


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
