"""`torchrun`, whose exit code is that of the rank which failed first.

Enters: torchrun's arguments. Leaves: the exit code; torchrun's own is 1 whatever happened.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

SIGNALLED = 128


def main(arguments: Sequence[str]) -> int:
    """Run torchrun in this process."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        sys.stderr.write(f"shardwise: rank {rank} failed first: {how} (process {failure.pid})\n")
        return code if code > 0 else SIGNALLED - code
    except SignalException as error:
        return SIGNALLED + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
