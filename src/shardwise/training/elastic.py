"""Elastic training: the launcher of its processes, and the training over several generations.

When processes are lost, the others abandon the step, form a group with new ranks, take a plan for
them, restore the newest state that is complete in their memories, and continue with the same global
batch and the next sample. When processes are added, all switch between two steps. If memory lacks a
part of the state, the training continues from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.memory import Snapshot, Snapshots
from shardwise.processes import GRACE_S, forwarded_signals, started
from shardwise.runtime.devices import backend_of
from shardwise.runtime.rendezvous import host_store
from shardwise.training.config import ElasticConfig
from shardwise.training.membership import (
    ADDRESS,
    ENDED,
    MEMBER,
    ElasticStore,
    Member,
    Membership,
    MembershipChanged,
)
from shardwise.training.processes import World, choose_device, local_device
from shardwise.training.session import Ingredients, Session

if TYPE_CHECKING:
    from shardwise.training.trainer import FitResult, Trainer

EVENTS_FILE = "elastic.jsonl"  # in the run's folder: generations, their reasons and times
RESIZE_FILE = "ranks"  # in the run's folder: the number of ranks that a user asks for
MAX_ATTEMPTS = 5  # at a generation of the same processes, without a step between
START_S = 300.0  # for a process to show its first sign of life
_POLL_S = 0.02
_REPORT_S = 1.0  # for a death to show after a rank has reported a failure


# ------------------------------------------------------------ the launcher
class Launcher:
    """Starts the processes of a training and decides which of them take part.

    It sees every death at once, because the processes are its children, and kills those that are
    silent. As the only writer of the membership it cannot disagree with itself: there is never a
    second training, and one that cannot continue ends.
    """

    def __init__(
        self, ranks: int, arguments: Sequence[str], config: ElasticConfig, folder: Path | None
    ) -> None:
        self.config, self.target, self._folder = config, ranks, folder
        self._command = [sys.executable, "-m", "shardwise.cli", *arguments]
        hosted = host_store("127.0.0.1")
        self._address, self._store = f"127.0.0.1:{hosted.port}", ElasticStore(hosted)
        self._threads = str(max(1, (os.cpu_count() or 1) // ranks))
        self._processes: list[Any] = []  # by member number
        self._stack = contextlib.ExitStack()
        self._beats: dict[int, tuple[str, float]] = {}
        self._membership = Membership(generation=0, members=tuple(range(ranks)), reason="start")
        self._silent: set[int] = set()
        self._attempts, self._failed_at = 0, 0.0
        self._began = 0  # the newest generation that processes may be in
        self._running = self._membership.members  # of the newest generation with a step
        self._leaving: set[int] = set()

    def run(self) -> int:
        """Run until all processes have ended; return the exit code."""
        with self._stack, forwarded_signals(self._processes):
            for _ in range(self.target):
                self._start()
            self._begin(self._membership.members, "start")
            failed, deadline = 0, float("inf")
            while True:
                time.sleep(_POLL_S)
                codes = [process.poll() for process in self._processes]
                failed = failed or next((code for code in codes if code and code > 0), 0)
                running, joined = {*self._running} - self._leaving, self._membership.members
                has_ended = failed or any(codes[m] == 0 for m in running.union(joined))
                if has_ended and deadline == float("inf"):
                    deadline = time.monotonic() + GRACE_S
                # Processes that were to join are not needed any more.
                is_training = any(codes[member] is None for member in running)
                if has_ended and (not is_training or time.monotonic() > deadline):
                    return failed
                if not has_ended and not self._supervise(codes):
                    return 1

    def _start(self) -> None:
        number = len(self._processes)
        environment = {
            ADDRESS: self._address,
            MEMBER: str(number),
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", self._threads),
            # The sockets of an abandoned generation are shut down: torch would print stacks.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        }
        self._processes.append(self._stack.enter_context(started(self._command, environment)))

    def _begin(self, members: Sequence[int], reason: str, *, planned: bool = False) -> None:
        membership = Membership(
            generation=self._membership.generation + 1,
            members=tuple(members),
            reason=reason,
            planned=planned,
            began_at=time.time(),
        )
        self._store.begin(membership)
        self._membership, self._failed_at = membership, 0.0
        if not planned:
            self._began = membership.generation
        if membership.generation > 1:
            sys.stderr.write(f"elastic: {membership}\n")

    def _supervise(self, codes: Sequence[int | None]) -> bool:
        """Begin another generation if one is needed; return False if training cannot continue."""
        members = self._membership.members
        self._kill_silent([m for m in range(len(codes)) if codes[m] is None])
        alive = [m for m in members if codes[m] is None]
        lost = [m for m in members if codes[m] is not None]
        if lost:
            return self._continue_without(lost, alive, self._starting(codes))
        if report := self._failure():
            self._attempts += 1
            if self._attempts > MAX_ATTEMPTS:
                return self._end(f"{MAX_ATTEMPTS} attempts failed; the last one: {report}")
            self._begin(alive, report)
        elif self._store.read(f"running/{self._membership.generation}") is not None:
            self._attempts, self._running = 0, members
            self._began = self._membership.generation
            for member in self._leaving:
                self._processes[member].kill()
            self._resize(self._starting(codes))
        return True

    def _starting(self, codes: Sequence[int | None]) -> list[int]:
        """Return the living processes that do not take part yet."""
        members = self._membership.members
        others = [m for m in range(len(codes)) if m not in {*members, *self._leaving}]
        return [member for member in others if codes[member] is None]

    def _continue_without(
        self, lost: Sequence[int], alive: Sequence[int], starting: Sequence[int]
    ) -> bool:
        """Begin a generation without some processes, as soon as there are enough others."""
        names = ", ".join(self._describe(member) for member in lost)
        enough = len(alive) >= self.config.min_ranks
        if not self.config.replace:
            self.target = len(alive)
            if not enough:
                return self._end(
                    f"{names}; {len(alive)} ranks are left, min_ranks is {self.config.min_ranks}"
                )
        elif not enough:
            alive = [*alive, *self._joining(starting, self.target - len(alive))]
        if len(alive) >= self.config.min_ranks:
            self._begin(alive, names)
        return True

    def _describe(self, member: int) -> str:
        name = f"rank {self._membership.rank_of(member)}"
        if member in self._silent:
            return f"{name} was silent for {self.config.silent_s:g} s"
        code = -self._processes[member].returncode
        return f"{name} was killed by {signal.Signals(code).name}"

    def _kill_silent(self, alive: Sequence[int]) -> None:
        """Kill processes without a sign of life, so that they cannot come back later."""
        now = time.monotonic()
        for member in alive:
            beat = self._store.read(f"alive/{member}") or ""
            if self._beats.get(member, (None, 0.0))[0] != beat:
                self._beats[member] = beat, now
            limit_s = self.config.silent_s if beat else START_S
            if beat != ENDED and now - self._beats[member][1] > limit_s:
                self._silent.add(member)
                self._processes[member].kill()

    def _failure(self) -> str | None:
        """Return the failure that a rank has reported, if no death explains it within a moment."""
        numbers = {self._began, self._membership.generation}
        reports = filter(None, (self._store.read(f"failed/{number}") for number in numbers))
        report = next(reports, None)
        if report is not None and not self._failed_at:
            self._failed_at = time.monotonic()
        return report if time.monotonic() - self._failed_at > _REPORT_S else None

    def _resize(self, starting: Sequence[int]) -> None:
        """Begin a generation with processes that are ready or without some, if that is wanted."""
        members = self._membership.members
        if self._folder is not None and (requested := _requested_ranks(self._folder)) is not None:
            self.target = max(requested, self.config.min_ranks)
        if len(members) > self.target:
            self._leaving.update(members[self.target :])
            self._begin(members[: self.target], f"{self.target} ranks requested", planned=True)
        elif ready := self._joining(starting, self.target - len(members)):
            self._begin((*members, *ready), f"{len(ready)} ranks joined", planned=True)

    def _joining(self, starting: Sequence[int], missing: int) -> Sequence[int]:
        """Start as many processes as are missing; return them once all are ready."""
        for member in starting[missing:]:
            self._processes[member].kill()
        for _ in range(missing - len(starting)):
            self._start()
        ready = [m for m in starting[:missing] if self._store.read(f"ready/{m}") is not None]
        return ready if len(ready) == missing else ()

    def _end(self, reason: str) -> bool:
        sys.stderr.write(f"elastic: the training ends: {reason}\n")
        return False


def _requested_ranks(folder: Path) -> int | None:
    """Return the number of ranks that the user has requested since the last time."""
    path = folder / RESIZE_FILE
    with contextlib.suppress(OSError, ValueError):
        number = int(path.read_text())
        path.unlink()
        return number if number > 0 else None
    return None


# ------------------------------------------------------------ the training
class Elastic:
    """An elastic training in one process: its copies of the state, over all generations."""

    def __init__(self, trainer: Trainer, base: Path | None) -> None:
        assert trainer.config.elastic is not None
        self.trainer, self.config = trainer, trainer.config.elastic
        self.member = Member()
        self.ingredients = Ingredients(trainer.config, base)
        self.member.write(f"ready/{self.member.id}")
        self.available: tuple[Snapshot, ...] = ()
        self._snapshots: Snapshots | None = None
        self._membership: Membership | None = None
        self._event: dict[str, Any] = {}
        self._reached = 0  # the newest step of this process
        self._times: dict[str, float] = {}
        self._timed_at = 0.0

    def fit(self) -> FitResult:
        """Train until the end, over all generations in which this process takes part."""
        generation, left = 0, None
        self._timed_at = time.monotonic()
        try:
            while True:
                membership = self.member.next_membership(generation)
                generation = membership.generation
                if left is not None and self.member.id not in membership.members:
                    return left
                if self.member.id not in membership.members:
                    continue
                self._time("agree")
                try:
                    result = self._run(membership)
                    if result.stopped != "left":
                        return result
                    left, begin = result, time.monotonic()
                except MembershipChanged as change:
                    begin = self.member.seen_at
                    traceback.clear_frames((change.__cause__ or change).__traceback__)
                self._times, self._timed_at = {}, begin
                self._release()
        finally:
            self.member.end()

    def _run(self, membership: Membership) -> FitResult:
        """Train in one generation, until the end or until the next generation."""
        config, size = self.trainer.config, len(membership.members)
        device = local_device(choose_device(config.device))
        backend = backend_of(device.type, size)
        self._membership = membership
        with self.member.generation(membership, backend, config.timeout_s):
            self._time("connect")
            rank = membership.members.index(self.member.id)
            world = World(rank=rank, size=size, device=device)
            session = Session(self.ingredients, world, adapt=membership.generation > 1)
            self._time("compile")
            self.member.connected()
            checkpoint = self._restore(session)
            try:
                return self.trainer.fit_session(session, checkpoint, self)
            except BaseException:
                with contextlib.suppress(Exception):  # its files must not be written any more
                    session.finish_saving()
                raise

    def _release(self) -> None:
        """Release everything that belongs to the generation that has ended."""
        self._snapshots = None
        self.trainer.close()
        gc.collect()
        self._time("abort")

    def _time(self, part: str) -> None:
        """Attribute the time since the last part to this one."""
        now = time.monotonic()
        self._times[part], self._timed_at = now - self._timed_at, now

    # ------------------------------------------------------------ the state
    def _restore(self, session: Session) -> Path | None:
        """Restore the state in a new generation; return the checkpoint that it came from, if any.

        The snapshots of earlier generations are kept until all ranks have one of this generation.
        """
        assert self._membership is not None
        tag, checkpoint = session.restore(self.available), None
        if tag is None:
            checkpoint = session.resume()
        self._time("move")
        self._snapshots = Snapshots(session.module, generation=self._membership.generation)
        self._snapshots.available = tuple(s for s in self.available if s.tag == tag)
        self._copy(session)
        self._time("copy")
        members = self._membership.members
        self._event = {
            "generation": self._membership.generation,
            "ranks": len(members),
            "plan": session.planned.plan.name,
            "reason": self._membership.reason,
            "began_at": self._membership.began_at,
            "step": session.step,
            "repeated": max(0, self._reached - session.step),
            "state_from": "memory" if tag is not None else str(checkpoint or "the start"),
            **{f"{part}_s": round(seconds, 3) for part, seconds in self._times.items()},
        }
        return checkpoint

    def _copy(self, session: Session, stay: Sequence[int] | None = None) -> None:
        assert self._snapshots is not None
        try:
            session.snapshot(self._snapshots, stay)
        finally:
            self.available = self._snapshots.available

    def report(self, session: Session, say: Callable[[str], None]) -> None:
        """Log the generation that begins; only rank 0 does."""
        if not session.world.is_main:
            return
        event = self._event
        if event["generation"] > 1:
            say(
                f"step {event['step']}  generation {event['generation']}: {event['ranks']} ranks "
                f"({event['reason']}), plan {event['plan']}, state from {event['state_from']}"
            )
        if session.config.folder is not None:
            with (Path(session.config.folder) / EVENTS_FILE).open("a") as file:
                file.write(json.dumps(event) + "\n")

    def after_step(self, session: Session, *, is_last: bool) -> None:
        """Copy the state if it is due, or if other ranks continue after this step."""
        assert self._snapshots is not None
        assert self._membership is not None
        if self._event:  # this was the first step of the generation
            self.member.write(f"running/{self._membership.generation}")
            self._event = {}
        self._reached = session.step
        self._snapshots.settle()  # all ranks have passed the step after the newest snapshot
        if is_last:
            following = self.member.planned_membership(self.trainer.config.timeout_s)
            members = enumerate(self._membership.members)
            stay = [rank for rank, member in members if member in following.members]
            self._copy(session, stay)
        elif session.step % self.config.every_steps == 0:
            self._copy(session)
        self.available = self._snapshots.available
