"""Run `torchrun` and return the exit code of the rank that failed first; torchrun's own is 1."""

import sys
from collections.abc import Sequence
from typing import Any

from shardwise.launch.node import SIGNAL_STATUS, exit_status


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
        reason = f"exit code {code}" if code > 0 else f"signal {-code}"
        sys.stderr.write(f"shardwise: rank {rank} failed first: {reason} (process {failure.pid})\n")
        return exit_status(code) or 1
    except SignalException as error:
        return SIGNAL_STATUS + int(error.sigval)
    return 0


def _bind_store() -> None:
    """Make the first node's agent listen on the master address only, not on all interfaces."""
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    from shardwise.listening import listening_socket

    tcp_store: Any = static_tcp_rendezvous.TCPStore  # type: ignore[attr-defined]

    def bound_store(
        host: str, port: int, num_hosts: int, is_master: bool, *args: Any, **options: Any
    ) -> Any:
        if is_master:
            listener = listening_socket(host, port, num_hosts=num_hosts)
            options["master_listen_fd"] = listener.detach()
        return tcp_store(host, port, num_hosts, is_master, *args, **options)

    static_tcp_rendezvous.TCPStore = bound_store  # type: ignore[attr-defined, assignment]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
