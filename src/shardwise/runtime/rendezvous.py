"""Rendezvous of all ranks over the c10d store of the default process group.

Ranks publish short texts in numbered rendezvous and wait for those of the others. Nothing here is
a collective, so a rank that fails, dies or never arrives cannot hang its peers: every wait has a
timeout, and its error names the missing ranks. Each rank also runs a heartbeat, a thread that
increments a counter in the store, as long as the process is alive.
"""

import atexit
import contextlib
import datetime
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.errors import RankError, ShardwiseError

HEARTBEAT_S = 0.5
DEAD_AFTER_S = 4.0  # without a heartbeat
ENDED = -1  # the counter of a process that has exited normally
_POLL_S = 0.02
_LIVENESS_S = 1.0  # between checks of heartbeats
_ANSWER_S = 30.0  # for the store to answer one request
_JOIN_S = 120.0  # for all ranks to begin the same operation
_MAX_RENDEZVOUS = 4  # of each name whose keys stay in the store
_AGREED = "agreed"


# Hosting and joining the store


def host_store(
    host: str,
    port: int = 0,
    *,
    num_hosts: int = 1,
    timeout: datetime.timedelta = datetime.timedelta(minutes=5),
) -> TCPStore:
    """Host a store that listens at `host` only, and connect to it.

    torch's own store accepts connections on every interface, so that anyone who reaches its port
    could read and change what ranks publish.
    """
    from shardwise.listening import listening_socket

    listener = listening_socket(host, port, num_hosts=num_hosts)
    return TCPStore(
        host_name=host,
        port=listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def group_store(
    host: str, port: int, *, rank: int, num_hosts: int, timeout: datetime.timedelta
) -> TCPStore | None:
    """Return the store of a group, hosted by rank 0; None where torchrun's agent hosts it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if rank == 0:
        return host_store(host, port, num_hosts=num_hosts, timeout=timeout)
    return TCPStore(host, port, is_master=False, timeout=timeout)


# torch ends the process at the first error of NCCL, before `nccl_watch` can name the rank at fault;
# the flight recorder lists the latest operations of a rank.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


def init_process_group(backend: str, timeout: datetime.timedelta) -> None:
    """Join the group of torchrun's variables; rank 0 hosts the store if no agent does."""
    if backend == "nccl":
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = group_store(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        rank=rank,
        num_hosts=1 if os.environ.get("LOCAL_WORLD_SIZE") == str(size) else size,
        timeout=timeout,
    )
    options: dict[str, Any] = {}
    if store is not None:
        options = {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timeout, **options)


def shared_gpu_environment(rank: int) -> dict[str, str]:
    """Return the variables with which NCCL accepts several ranks on one GPU, for tests.

    NCCL refuses two ranks of one host on one device. With these, each rank has its own host, and
    they communicate through sockets of the loopback interface: slow, but under the same rules.
    """
    return {
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
    }


def has_peers() -> bool:
    """Return whether the default process group has other ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


class Connection:
    """A private connection to the default group's store, for keys under `shardwise/`.

    A connection serves one request at a time: a blocking one of another user would delay ours.
    Reads never block, so any number of threads may share one connection.
    """

    def __init__(self, timeout_s: float) -> None:
        # Referenced so that a store hosted by this process outlives the process group.
        default: Any = torch.distributed.distributed_c10d._get_default_store()
        self._default = default
        # A new connection to a dead host would be retried for minutes: test the open one first.
        default.check(["shardwise/alive"])
        self._store = default.clone()
        self._store.set_timeout(datetime.timedelta(seconds=timeout_s))

    def has(self, key: str) -> bool:
        return bool(self._store.check([f"shardwise/{key}"]))

    def read(self, key: str) -> str | None:
        """Return a value, or None if it was not written or is empty."""
        return (self._store.get(f"shardwise/{key}").decode() or None) if self.has(key) else None

    def write(self, key: str, text: str) -> None:
        self._store.set(f"shardwise/{key}", text)

    def write_first(self, key: str, text: str, expected: str = "") -> str:
        """Write unless another rank has; return the value that is stored now."""
        stored: str = self._store.compare_set(f"shardwise/{key}", expected, text).decode()
        return stored

    def count(self, key: str, increment: int = 0) -> int:
        """Increment a counter and return it."""
        value: int = self._store.add(f"shardwise/{key}", increment)
        return value

    def delete(self, key: str) -> None:
        self._store.delete_key(f"shardwise/{key}")


def lost_store() -> tuple[str, list[int]]:
    """Describe the loss of the store, and list the ranks it implies are dead."""
    if dist.is_torchelastic_launched():
        return "the launcher, which hosts the store, is gone", []
    return "rank 0 died: the store that it hosts is gone", [0]


@contextlib.contextmanager
def naming_the_host(waiting_for: Callable[[], str] = str) -> Iterator[None]:
    """Turn the loss of the store within the body into an error that names its host."""
    try:
        yield
    except RuntimeError as error:
        text = f"{lost_store()[0]}{waiting_for()}: {first_line(error)}"
        raise RankError(text, where=f"rank {dist.get_rank()}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks [1, 3]`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


# Heartbeats


class Beat(NamedTuple):
    """The state of a rank as of its last heartbeat; see the attributes of `Heartbeat`."""

    counter: int | None = None
    knows_cause: bool = False
    num_runs: int = 0
    body: int = 0
    verb: str = ""
    has_failed: bool = False


class Heartbeat:
    """Show in the store that this rank is alive, and read there the cause of a failure.

    The thread reads the common cause of a failure with every beat, and acknowledges it: rank 0
    keeps the store that it hosts until the others know the cause.
    """

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.rank = dist.get_rank()
        self.cause: str | None = None
        self.num_runs = 0  # of programs that this rank has begun to run
        self.body = 0, ""  # the number of the latest body of `naming_failures`, and its verb
        self.has_failed = False  # in a body since ranks last met: their numbers may differ
        self._connection = Connection(timeout_s=10.0)
        self._stop = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="shardwise-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def _run(self) -> None:
        beats = 0
        with contextlib.suppress(RuntimeError):
            while not self._stop.wait(HEARTBEAT_S) and dist.group.WORLD is self.group:
                beats += 1
                self.cause = self._connection.read("cause")
                self._beat(beats)

    def _beat(self, beats: int) -> None:
        state = (self.num_runs, *self.body, self.has_failed)
        beat = Beat(beats, self.cause is not None, *state)
        self._connection.write(f"heartbeat/{self.rank}", json.dumps(beat))

    def end(self) -> None:
        """Stop, and mark a normal exit."""
        self._stop.set()
        self._thread.join(HEARTBEAT_S)
        with contextlib.suppress(RuntimeError):
            self._beat(ENDED)


_heartbeat: Heartbeat | None = None  # of the default process group


def start_heartbeat() -> Heartbeat | None:
    """Start this rank's heartbeat unless it runs; return None without other ranks."""
    global _heartbeat
    if not has_peers():
        return None
    if _heartbeat is None or _heartbeat.group is not dist.group.WORLD:
        with naming_the_host():
            _heartbeat = Heartbeat()
    return _heartbeat


def count_run() -> None:
    """Count a program that this rank begins to run, and that the others must run as well."""
    if _heartbeat is not None:
        _heartbeat.num_runs += 1


class Liveness:
    """The heartbeats of other ranks, observed from this one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seen: dict[int, tuple[int | None, float]] = {}  # counter, and when it changed

    def latest(self, rank: int) -> Beat:
        """Return a rank's last heartbeat, or one without a counter."""
        text = self._connection.read(f"heartbeat/{rank}")
        return Beat() if text is None else Beat(*json.loads(text))

    def dead(self, ranks: Sequence[int], after_s: float = DEAD_AFTER_S) -> list[int]:
        """Return the ranks that have begun, have not exited, and show no heartbeat."""
        observed = {rank: self.observe(rank) for rank in ranks}
        return [
            rank
            for rank, (beats, unchanged_s) in observed.items()
            if beats not in (None, ENDED) and unchanged_s >= after_s
        ]

    def observe(self, rank: int) -> tuple[int | None, float]:
        """Return a rank's counter, and for how many seconds it has not changed."""
        now, beats = time.monotonic(), self.latest(rank).counter
        if rank not in self._seen or self._seen[rank][0] != beats:
            self._seen[rank] = beats, now
        return beats, now - self._seen[rank][1]


# Numbered rendezvous


class Rendezvous:
    """One rank's part in an operation of all ranks; this base class is for a single rank."""

    rank, world = 0, 1
    reason = ""  # why this rank takes part, for messages
    join_s = _JOIN_S

    def publish(self, point: str, text: str = "") -> None:
        """Announce that this rank has reached a point."""

    def withdraw(self, point: str) -> None:
        """Undo the announcement of a point, so that this rank may begin the operation again."""

    def fail(self, error: BaseException, doing: str = "") -> None:
        """Announce that this rank cannot continue, and why."""

    def wait_for(self, point: str, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Return the texts that ranks published at a point, once all have; raise if one cannot."""
        return dict.fromkeys(ranks, "")

    def settle(self, outcome: str) -> str:
        """Record the outcome of the operation unless another rank has; return the recorded one."""
        return outcome

    def run(self, work: Callable[[], Any], timeout_s: float) -> Any:
        """Call `work` on every rank; if it fails on one, fail on all and name that rank."""
        return work()


class _StoreRendezvous(Rendezvous):
    def __init__(self, name: str, error: type[ShardwiseError]) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        start_heartbeat()
        self.name, self._error, self.reason = name, error, ""
        self._connection = _connection()
        # Counted in the store when a rank begins: a rank that fails early has taken part, so that
        # the next rendezvous has the same number on all ranks.
        self.number = self._connection.count(f"{name}/joined/{self.rank}", 1)
        self.prefix = f"{name}/{self.number}"
        self._failed = False
        self._keys: list[str] = []
        recent = _published.setdefault(self.name, deque())
        recent.append(self._keys)
        if len(recent) > _MAX_RENDEZVOUS:
            with contextlib.suppress(RuntimeError):
                for key in recent.popleft():
                    self._connection.delete(key)

    def publish(self, point: str, text: str = "") -> None:
        key = f"{self.prefix}/{point}/{self.rank}"
        self._keys.append(key)
        with naming_the_host():
            self._connection.write(key, text)
            self._connection.count(f"{self.prefix}/{point}", 1)

    def withdraw(self, point: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._connection.delete(f"{self.prefix}/{point}/{self.rank}")
            self._connection.count(f"{self.prefix}/{point}", -1)
            self._connection.count(f"{self.name}/joined/{self.rank}", -1)

    def fail(self, error: BaseException, doing: str = "") -> None:
        if self._failed:
            return
        self._failed = True
        with contextlib.suppress(RuntimeError):
            self._connection.write(f"{self.prefix}/failed/{self.rank}", _encode(error, doing))
            self._connection.count(f"{self.prefix}/failed", 1)

    def settle(self, outcome: str) -> str:
        with naming_the_host():
            return self._connection.write_first(f"{self.prefix}/settled", outcome)

    def wait_for(self, point: str, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        start = checked = time.monotonic()
        liveness = Liveness(self._connection)
        missing = list(ranks)
        with naming_the_host(lambda: f", before {name_ranks(missing)} of {self.world} arrived"):
            while not self._all_published(point, ranks):
                self._raise_failures(ranks)
                now = time.monotonic()
                if now - checked > min(_LIVENESS_S, timeout_s / 4):
                    checked = now
                    missing = [r for r in ranks if not self._has_published(point, r)]
                    self._check_missing(missing, liveness, now - start, timeout_s)
                time.sleep(min(_POLL_S, 0.001 + (now - start) / 4))
            return {r: self._connection.read(f"{self.prefix}/{point}/{r}") or "" for r in ranks}

    def _has_published(self, point: str, rank: int) -> bool:
        return self._connection.has(f"{self.prefix}/{point}/{rank}")

    def _all_published(self, point: str, ranks: Sequence[int]) -> bool:
        if len(ranks) == 1:
            return self._has_published(point, ranks[0])
        return self._connection.count(f"{self.prefix}/{point}") >= len(ranks)

    def _raise_failures(self, ranks: Sequence[int]) -> None:
        if not self._connection.count(f"{self.prefix}/failed"):
            return
        for rank in ranks:
            text = self._connection.read(f"{self.prefix}/failed/{rank}")
            if text is not None:
                message, where, hint = json.loads(text)
                # A failure that was passed on already names the rank where it began.
                named = message if message.startswith("rank") else f"rank {rank}: {message}"
                raise self._error(named, where=where, hint=hint)

    def _check_missing(
        self, missing: Sequence[int], liveness: Liveness, waited: float, timeout_s: float
    ) -> None:
        """Raise an error that names missing ranks that died, never began, or take too long."""
        own = _heartbeat
        assert own is not None
        silent: dict[int, int] = {}
        absent: list[int] = []
        ahead: dict[int, str] = {}  # with the operation that each began
        for rank in missing:
            counter, unchanged_s = liveness.observe(rank)
            beat = liveness.latest(rank)  # read before whether the rank has joined
            if counter is not None and unchanged_s > DEAD_AFTER_S:
                silent[rank] = counter
            if self._connection.count(f"{self.name}/joined/{rank}") < self.number:
                absent.append(rank)
                is_elsewhere = beat.body == own.body[0] and beat.verb != own.body[1]
                is_ahead = beat.num_runs > own.num_runs or beat.body > own.body[0] or is_elsewhere
                if is_ahead and not own.has_failed and not beat.has_failed:
                    ahead[rank] = f"to {beat.verb}" if beat.verb else "another step"
        join_s = min(self.join_s, timeout_s)
        if dead := [rank for rank, counter in silent.items() if counter != ENDED]:
            raise RankError(f"{name_ranks(dead)} died: no heartbeat for {DEAD_AFTER_S:g} s")
        if silent:
            raise RankError(f"{name_ranks([*silent])} ended before all ranks began to {self.name}")
        if ahead and self.name != "start":
            began = ", ".join(f"rank {rank} began {verb}" for rank, verb in ahead.items())
            raise RankError(
                f"rank {self.rank} began to {self.name}, while {began}",
                hint="give all ranks the same number of batches, and run the same lines on each",
            )
        if ahead:
            raise RankError(
                f"rank {self.rank} needs another program{self.reason}, while "
                f"{name_ranks([*ahead])} already ran the step with the current one",
                hint="change attributes, variables, hooks and requires_grad in the same way on "
                "every rank, and give all ranks the same batches",
            )
        if absent and waited > join_s:
            raise RankError(
                f"ranks {absent} of {self.world} did not begin to {self.name} within {join_s:g} s",
                hint=f"all ranks {self.name} together",
            )
        if missing and waited > timeout_s:
            raise RankError(
                f"ranks {[*missing]} of {self.world} did not complete `{self.name}` within "
                f"{timeout_s:g} s"
            )

    def run(self, work: Callable[[], Any], timeout_s: float) -> Any:
        try:
            result = work()
            self.publish("done")
            if self.rank == 0:
                self.wait_for("done", range(self.world), timeout_s)
                self.publish("outcome")
            else:
                self.wait_for("outcome", [0], timeout_s)
        except BaseException as error:
            self.fail(error)
            raise
        return result


_published: dict[str, deque[list[str]]] = {}  # keys of this rank's latest rendezvous, by name
_shared: tuple[Any, Connection] | None = None  # of the default process group


def _connection() -> Connection:
    """Return the connection that all rendezvous share."""
    global _shared
    if _shared is None or _shared[0] is not dist.group.WORLD:
        _published.clear()
        _shared = dist.group.WORLD, Connection(_ANSWER_S)
    return _shared[1]


def open_rendezvous(name: str, error: type[ShardwiseError] = RankError) -> Rendezvous:
    """Open the next rendezvous of all ranks with this name, a verb such as "start".

    A failure of another rank is raised as `error`; ranks that are missing, as `RankError`.
    """
    if not has_peers():
        return Rendezvous()
    with naming_the_host():
        return _StoreRendezvous(name, error)


def _encode(error: BaseException, doing: str) -> str:
    """Return message, place and hint of an error as JSON."""
    message = getattr(error, "message", None) or first_line(error)
    if not isinstance(error, ShardwiseError):
        message = f"{type(error).__name__}: {message}"
    return json.dumps(
        [f"{doing}{message}", getattr(error, "where", None), getattr(error, "hint", None)]
    )


def meet(verb: str, timeout_s: float) -> None:
    """Wait until all ranks have begun an operation; raise if one began another instead.

    Collectives of different operations would not end, end the process or mix their data. Ranks
    agree on their numbers, which differ if only some of them had begun what failed on another.
    """
    rendezvous = open_rendezvous(verb)
    if _heartbeat is None:
        return
    rendezvous.join_s = timeout_s
    rendezvous.publish("begun", json.dumps([_heartbeat.num_runs, _heartbeat.body[0]]))
    try:
        texts = rendezvous.wait_for("begun", range(rendezvous.world), timeout_s).values()
    except RankError:
        rendezvous.withdraw("begun")
        raise
    _heartbeat.num_runs, number = map(max, zip(*map(json.loads, texts), strict=True))
    _heartbeat.body, _heartbeat.has_failed = (number, _heartbeat.body[1]), False


# Starting a program


class Agree(Protocol):
    """The function that `starting` yields, to be called once a program is compiled."""

    def __call__(self, fingerprint: str, values: Mapping[str, str] | None = None) -> None: ...


def require_ranks(num_ranks: int) -> None:
    """Require that the default group has exactly the ranks of a plan."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks < 1:
        raise RankError(f"a plan needs at least one rank, but this one has {num_ranks}")
    if num_ranks != world:
        group = "the default group has" if dist.is_initialized() else "without a process group:"
        other = ", or sw.plan(…, all_devices=True)" if num_ranks < world else ""
        raise RankError(
            f"the plan is for {num_ranks} ranks, {group} {world}",
            hint=f"torchrun --nproc-per-node {num_ranks}{other}",
        )


@contextlib.contextmanager
def starting(timeout_s: float = 60.0, reason: str = "") -> Iterator[Agree]:
    """Start together: the body makes a program and calls the function that this yields.

        with starting(timeout_s) as agree:
            program = ...
            agree(program.fingerprint)

    `agree` returns once all ranks have called it with the same fingerprint and the same `values`
    of the names they share (`agree(fingerprint, {"name": "value"})`). Otherwise it raises the same
    `RankError` on all ranks, which names those that failed in their body, are missing after
    `timeout_s`, already run a program, or differ. `reason` explains why this rank needs a new
    program. The first rank that knows the outcome records it.
    """
    if not has_peers():
        yield lambda fingerprint, values=None: None
        return
    rendezvous = open_rendezvous("start")
    rendezvous.reason = f" ({reason})" if reason else ""
    ranks = range(rendezvous.world)

    def agree(fingerprint: str, values: Mapping[str, str] | None = None) -> None:
        rendezvous.publish("program", json.dumps([fingerprint, dict(values or {})]))
        try:
            outcome = _difference(rendezvous.wait_for("program", ranks, timeout_s)) or _AGREED
        except RankError as error:
            rendezvous.fail(error)
            outcome = error.message
        outcome = rendezvous.settle(outcome)
        if outcome != _AGREED:
            raise RankError(
                outcome,
                hint="look at the logs of the ranks named here; all ranks must run the same steps, "
                "with the same batches, frozen parameters and modes",
            )
        meet("begin", timeout_s)

    try:
        yield agree
    except BaseException as error:
        own = f"rank {rendezvous.rank} of {rendezvous.world} failed before the start: "
        rendezvous.fail(error, doing=own)
        raise


def _difference(programs: Mapping[int, str]) -> str | None:
    """Describe how the programs of ranks differ."""
    by_fingerprint: dict[str, list[int]] = {}
    first_values = json.loads(programs[0])[1]
    for rank in sorted(programs):
        fingerprint, values = json.loads(programs[rank])
        by_fingerprint.setdefault(fingerprint, []).append(rank)
        for name in sorted(first_values.keys() & values.keys()):
            if values[name] != first_values[name]:
                return f"{name} on rank {rank} differs from rank 0"
    if len(by_fingerprint) == 1:
        return None
    listed = "; ".join(f"ranks {ranks}: {text[:16]}" for text, ranks in by_fingerprint.items())
    return f"ranks have different programs ({listed}): their model, batch, plan or version differ"
