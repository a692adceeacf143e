"""What the job files of schedulers have in common.

Enters: `Cluster`, a command and options. Leaves: a frozen `JobSpec`, checked, that each generator
writes in its own format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.cluster import Cluster
from shardwise.errors import ClusterError
from shardwise.launch.commands import UNBUFFERED, rank_program
from shardwise.launch.places import Environment

NO_OPTIONS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal nodes that follow each other."""

    num_nodes: int
    num_devices: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a scheduler is asked to start; the machines' addresses are the scheduler's to give."""

    name: str
    groups: tuple[Group, ...]
    is_cuda: bool
    program: tuple[str, ...]
    folder: str
    python: str
    environment: Environment
    options: tuple[tuple[str, str], ...]

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.groups)


def job_spec(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    name: str | None = None,
    python: str = "python3",
    environment: Environment = (),
    options: Mapping[str, str] = NO_OPTIONS,
) -> JobSpec:
    """Return the job of a cluster; node-wise folders, interpreters and variables must agree."""
    machines = cluster.machines()
    starts = [machine.start.over(cluster.start) for machine in machines]
    for machine, start in zip(machines, starts, strict=True):
        if start != starts[0]:
            raise ClusterError(
                f"nodes {machines[0].name} and {machine.name} start differently; a job file has"
                " one way",
                where=f"node {machine.name}",
                hint="start: {…} at the top of the cluster file",
            )
    kinds = {machine.device.kind for machine in machines}
    if len(kinds) > 1:
        raise ClusterError("nodes with and without GPUs in one job", hint="a cluster file each")
    for option, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", option) or any(not c.isprintable() for c in value):
            raise ClusterError(f"{option}={value!r} is no option", hint="--option partition=gpu")
    return JobSpec(
        name=job_name(name or cluster.name),
        groups=_groups([machine.count for machine in machines]),
        is_cuda=kinds == {"cuda"},
        program=rank_program(argv),
        folder=starts[0].folder,
        python=starts[0].python or python,
        environment=tuple(dict([UNBUFFERED, *starts[0].environment, *environment]).items()),
        options=tuple(options.items()),
    )


def job_name(text: str) -> str:
    """Return a name that every scheduler takes: lower case, digits and hyphens, at most 40 of them.

    >>> job_name("My lab's $(job)")
    'my-lab-s-job'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "shardwise"


def _groups(counts: Sequence[int]) -> tuple[Group, ...]:
    found: list[Group] = []
    for index, count in enumerate(counts):
        if found and found[-1].num_devices == count:
            last = found.pop()
            grown = Group(num_nodes=last.num_nodes + 1, num_devices=count, first=last.first)
            found.append(grown)
        else:
            found.append(Group(num_nodes=1, num_devices=count, first=index))
    return tuple(found)
