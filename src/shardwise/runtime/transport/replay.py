"""A transport that stands in for absent ranks: messages take the time of a cluster's links.

While a message travels, the rank computes. Operations of one group of ranks run one after the
other, as on a communicator. On a CPU a message ends at a time of the clock; on a GPU a kernel that
only waits occupies a stream of its own, on which the current stream waits where a program does.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.transport import Flat, Group, Pending
from shardwise.runtime.transport.fake import UninitializedTransport

Seconds = Callable[[str, float, tuple[int, ...]], float]  # of an operation, its bytes and ranks
Message = tuple[Callable[[], object], Callable[[], bool]]  # how to wait for it, and to poll it
SPIN_S = 2e-4  # before the end of a message, since a sleeping thread wakes late
CYCLES = 20_000_000  # of the kernel that measures how long a cycle takes


class ReplayTransport(UninitializedTransport):
    """The transport of a rank whose peers are absent.

    `seconds` gives the time of an operation on some bytes of some ranks. The k-th tensor that is
    received in a step arrives at the k-th time of `begin`. `sent` has the seconds of every
    collective, in the order in which they start.
    """

    def __init__(
        self, rank: int, world_size: int, seconds: Seconds, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(rank, world_size)
        self._seconds, self._device = seconds, torch.device(device)
        self.in_order = self._device.type == "cuda"  # as NCCL
        self._cycles_per_s = _cycles_per_s(self._device) if self.in_order else 0.0
        self._streams = defaultdict[Any, Any](partial(torch.cuda.Stream, self._device))
        self._free = defaultdict[Any, float](float)  # when the links of a group are
        self._arrivals: deque[float] = deque()
        self._began = 0.0
        self.sent: list[float] = []

    def begin(self, arrivals: Iterable[float]) -> None:
        """Start a step, in which tensors from other stages arrive after these seconds."""
        self._began, self._arrivals = time.perf_counter(), deque(arrivals)
        self.sent.clear()

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        return self._timed(flat.nbytes, group, super().all_reduce, flat, op, group)

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        num_bytes = sum(sizes) * flat.element_size()
        return self._timed(num_bytes, group, super().all_gather, flat, sizes, group, out)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        return self._timed(flat.nbytes, group, super().reduce_scatter, flat, sizes, group)

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        sizes = (in_sizes, out_sizes)
        return self._timed(flat.nbytes, group, super().all_to_all, flat, *sizes, group)

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        return self._timed(flat.nbytes, group, super().broadcast, flat, root, group)

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        sent = [Pending(f, *self._start("send", f.nbytes, (self.rank, to))) for f, to in sends]
        waits = [self._arrival(flat, source)[0] for flat, source in receives]
        received = super().exchange(sends, receives)[1]
        return sent, [_after(wait, result) for wait, result in zip(waits, received, strict=True)]

    def _timed(
        self, num_bytes: int, group: Group, collective: Callable[..., Pending], *args: Any
    ) -> Pending:
        """Return the result of a collective after its time on the links of its group."""
        wait, _ = self._start(collective.__name__, num_bytes, group.ranks)
        self.sent.append(self._seconds(collective.__name__, num_bytes, group.ranks))
        return _after(wait, collective(*args))

    def _start(self, operation: str, num_bytes: int, ranks: tuple[int, ...]) -> Message:
        """Start an operation after earlier ones of the same ranks."""
        seconds = self._seconds(operation, num_bytes, ranks)
        if self._device.type != "cuda":
            self._free[ranks] = max(time.perf_counter(), self._free[ranks]) + seconds
            return _until(self._free[ranks])
        stream, current = self._streams[ranks], torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(round(seconds * self._cycles_per_s))  # type: ignore[no-untyped-call]
        event = stream.record_event()
        return partial(current.wait_event, event), event.query

    def _arrival(self, flat: Tensor, source: int) -> Message:
        if not self._arrivals:  # of what follows the schedule: the loss, tied parameters
            return self._start("send", flat.nbytes, (source, self.rank))
        # A host that waits starts nothing on a GPU before the tensor is there.
        return _until(self._began + self._arrivals.popleft())


def _after(wait: Callable[[], object], pending: Pending) -> Pending:
    """Return a pending result that also waits for a message."""

    def finish(result: Tensor) -> Tensor:
        wait()
        return result

    return pending.then(finish)


def _until(end: float) -> Message:
    """Return a message that ends at a time of the clock."""

    def wait() -> None:
        time.sleep(max(0.0, end - time.perf_counter() - SPIN_S))
        while time.perf_counter() < end:
            pass

    return wait, lambda: time.perf_counter() >= end


def _cycles_per_s(device: torch.device) -> float:
    """Return how many cycles of the waiting kernel a GPU runs in a second."""
    stream: Any = torch.cuda.current_stream(device)
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        for _ in range(2):  # the first run loads the kernel
            begin.record(stream)
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            end.record(stream)
            stream.synchronize()
    return CYCLES / (begin.elapsed_time(end) * 1e-3)
