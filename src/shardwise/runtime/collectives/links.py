"""Unix sockets between the ranks of one host: short messages, shared memory, detection of death.

Ranks are on one host when they run on the same boot of a kernel, in the same network namespace, and
have reached each other: the sockets have names that only such processes see, leave nothing behind,
and can pass open files, and so memory, to another process.

Waiting uses no CPU and always has a time-out. When a process ends, its sockets close, so that its
death is known at once, without the store and its heartbeats. A rank that detects a failure
broadcasts a roll call; ranks that do not answer are reported as dead, the same ones everywhere.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from shardwise.errors import LinkError, RankError

MEET_S = 60.0  # ranks may connect at more different times than they start collectives
ROLL_S = 2.0  # for an answer of another waiting rank
GAVE_UP = ord("X")
MESSAGE_BYTES = 4096
_TABLE_BYTES = 512  # of the texts that ranks exchange when they connect
_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")


class Message(NamedTuple):
    """A kind, a body, and open files that were passed along."""

    kind: int
    body: bytes
    files: tuple[int, ...]


class Links:
    """This rank's sockets to all others of its group, used by one thread.

    Ranks are indices in the group; `names` are their global ranks, for errors.
    """

    def __init__(
        self, names: Sequence[int], rank: int, peers: dict[int, socket.socket], timeout_s: float
    ) -> None:
        self.names, self.rank, self.timeout_s = names, rank, timeout_s
        self._peers = peers
        self._by_number = {peer.fileno(): other for other, peer in peers.items()}
        self._came: dict[int, deque[Message]] = {other: deque() for other in peers}
        self._ended: set[int] = set()
        self._poll = select.poll()
        for peer in peers.values():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)

    def close(self) -> None:
        """Close the sockets, which tells the others that this rank has ended."""
        for peer in self._peers.values():
            peer.close()

    def tell(self, kind: int, body: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send to all others."""
        data = [bytes((kind,)) + body]
        for other, peer in self._peers.items():
            # A rank that has ended is detected when a message from it is expected.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                try:
                    socket.send_fds(peer, data, files)
                except BlockingIOError:
                    self.give_up(f"rank {self.names[other]} does not accept messages")

    def hear(self, kind: int, what: str) -> dict[int, Message]:
        """Return the next message of every other rank; `what` names the operation in errors."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            missing = [other for other, came in self._came.items() if not came]
            gave_up = any(m.kind == GAVE_UP for came in self._came.values() for m in came)
            if gave_up or not self._ended.isdisjoint(missing):  # waiting is futile
                self.give_up("", what, missing)
            if not missing:
                break
            if not self._listen(deadline):
                self.give_up("", what, missing)
        result = {other: came.popleft() for other, came in self._came.items()}
        for other, message in result.items():
            if message.kind != kind:
                self.give_up(f"rank {self.names[other]} runs another operation than {what}")
        return result

    def _listen(self, deadline: float) -> bool:
        """Receive messages; return whether any arrived before the deadline."""
        events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for number, _ in events:
            other = self._by_number[number]
            try:
                data, files, _, _ = socket.recv_fds(self._peers[other], MESSAGE_BYTES, 1)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data, files = b"", []
            if data:
                self._came[other].append(Message(data[0], data[1:], tuple(files)))
            else:
                self._ended.add(other)
                self._poll.unregister(self._peers[other])
        return bool(events)

    def give_up(self, reason: str, what: str = "", missing: Sequence[int] = ()) -> NoReturn:
        """Call the roll and raise the common verdict: silent ranks, or else the first reason."""
        # JSON would take six bytes for each other character, and messages have a limit.
        reason = reason.encode("ascii", "replace").decode()
        own = {"reason": reason[:1000], "what": what[:200], "missing": list(missing)}
        with contextlib.suppress(RankError):
            self.tell(GAVE_UP, json.dumps(own).encode())
        reported = {self.rank: own}
        deadline = time.monotonic() + min(ROLL_S, self.timeout_s)
        while True:
            for other, came in self._came.items():
                reported.update((other, json.loads(m.body)) for m in came if m.kind == GAVE_UP)
            silent = [other for other in self._peers if other not in reported]
            if not silent or self._ended.issuperset(silent) or not self._listen(deadline):
                break
        raise self._verdict(reported, silent)

    def _verdict(self, reports: dict[int, dict[str, Any]], silent: list[int]) -> RankError:
        names, own = self.names, f"rank {self.names[self.rank]}"
        for other, report in sorted(reports.items()):
            if report["reason"]:
                return RankError(f"rank {names[other]}: {report['reason']}", where=own)
        what = next(report["what"] for report in reports.values() if report["what"])
        if silent:
            gone = [names[other] for other in silent]
            who = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {gone}"
            ended = self._ended.issuperset(silent)
            how = "ended" if ended else f"sent nothing for {self.timeout_s:g} s"
            return LinkError(
                f"{what}: {who} {how}",
                edges=[(other, names[self.rank]) for other in gone],
                where=own,
                hint=f"look at the log of rank {gone[0]}, or set a longer `timeout_s`",
            )
        late = {
            (names[m], names[other]) for other, report in reports.items() for m in report["missing"]
        }
        return LinkError(
            f"{what}: not all ranks arrived within {self.timeout_s:g} s",
            edges=sorted(late),
            where=own,
            hint="a longer `timeout_s`",
        )


def host_identity() -> str:
    """Return a text that identifies the host and its network namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return f"{boot} {network.st_dev}:{network.st_ino} {os.getuid()}"


def connect(group: dist.ProcessGroup | None, timeout_s: float) -> Links | str:
    """Connect all ranks of a group; return the links, or on all ranks the reason of a failure."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    limit_s = max(timeout_s, MEET_S)
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as opened:
        listener, address = _listener(opened, count)
        peers_info = _exchange(group, [host_identity(), address], limit_s)
        hosts = {host for host, _ in peers_info}
        unable = [r for r, (host, address) in enumerate(peers_info) if not (host and address)]
        reason = f"ranks are on {len(hosts)} hosts" if len(hosts) > 1 else ""
        if unable:
            reason = f"ranks {unable} have no sockets that can pass memory"
        peers: dict[int, socket.socket] = {}
        if not reason and listener is not None:
            try:
                peers = _meet(opened, listener, [to for _, to in peers_info], rank, deadline)
            except OSError as error:
                reason = f"rank {rank} cannot reach the other ranks of its host: {error}"
        reasons = [text for (text,) in _exchange(group, [reason], limit_s) if text]
        if reasons:
            return reasons[0]
        if listener is not None:
            listener.close()
        opened.pop_all()
    names = dist.get_process_group_ranks(group or dist.group.WORLD)
    return Links(names, rank, peers, timeout_s)


def _listener(opened: contextlib.ExitStack, count: int) -> tuple[socket.socket | None, str]:
    address = f"shardwise-{secrets.token_hex(16)}"
    try:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(f"\0{address}")
        listener.listen(count)
    except (OSError, AttributeError):  # no such sockets on this system
        return None, ""
    return listener, address


def _meet(
    opened: contextlib.ExitStack,
    listener: socket.socket,
    addresses: Sequence[str],
    rank: int,
    deadline: float,
) -> dict[int, socket.socket]:
    """Connect to all lower ranks and accept connections of all higher ones."""
    peers: dict[int, socket.socket] = {}
    for other in range(rank):
        peer = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        peer.settimeout(max(0.01, deadline - time.monotonic()))
        peer.connect(f"\0{addresses[other]}")
        peer.send(_HELLO.pack(rank))
        peers[other] = peer
    while len(peers) < len(addresses) - 1:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        peer = opened.enter_context(listener.accept()[0])
        size = _CREDENTIALS.size
        _, user, _ = _CREDENTIALS.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        peer.settimeout(max(0.01, deadline - time.monotonic()))
        hello = peer.recv(_HELLO.size) if user == os.getuid() else b""
        other = _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else -1
        if rank < other < len(addresses) and other not in peers:
            peers[other] = peer
    return dict(sorted(peers.items()))


def _exchange(
    group: dist.ProcessGroup | None, texts: Sequence[str], timeout_s: float
) -> list[list[str]]:
    """Return the texts of all ranks, by a collective of the group."""
    device = torch.device("cuda" if str(dist.get_backend(group)) == "nccl" else "cpu")
    data = json.dumps([text.encode("ascii", "replace").decode()[:200] for text in texts]).encode()
    row = torch.zeros(_TABLE_BYTES, dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.zeros_like(row, device=device) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(rows, row.to(device), group=group, async_op=True)
    work.wait(timedelta(seconds=timeout_s))
    return [json.loads(bytes(row.cpu().numpy()).rstrip(b"\0")) for row in rows]
