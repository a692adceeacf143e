"""`torchrun`, whose exit code is that of the rank which failed first.

Enters: torchrun's arguments. Leaves: the exit code; torchrun's own is 1 whatever happened.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

SIGNALLED = 128


def main(arguments: Sequence[str]) -> int:
    """Run torchrun in this process."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    _bind_store()
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


def _bind_store() -> None:
    """Have the first node's agent host its store at the address of the ranks' meeting alone."""
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    from shardwise.listening import listening_socket

    made: Any = static_tcp_rendezvous.TCPStore  # type: ignore[attr-defined]

    def store(host: str, port: int, hosts: int, is_master: bool, *rest: Any, **more: Any) -> Any:
        if is_master:
            more["master_listen_fd"] = listening_socket(host, port, num_hosts=hosts).detach()
        return made(host, port, hosts, is_master, *rest, **more)

    static_tcp_rendezvous.TCPStore = store  # type: ignore[attr-defined, assignment]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
