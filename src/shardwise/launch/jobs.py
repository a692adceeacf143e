"""Write job files that start the ranks of a cluster: for Slurm, Kubernetes (PyTorchJob) and Ray.

The scheduler chooses the machines: of the cluster file, only the numbers of nodes and devices and
the settings for starting count.
"""

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypedDict, Unpack

import yaml

from shardwise.cluster import Cluster
from shardwise.errors import ClusterError
from shardwise.launch.hosts import (
    UNBUFFERED,
    Environment,
    quoted_path,
    rank_program,
    torchrun_arguments,
)


class JobSettings(TypedDict, total=False):
    """The name of a job, the port of its rendezvous, variables, and options of the scheduler."""

    name: str | None
    port: int
    environment: Environment
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Consecutive nodes with the same number of devices."""

    num_nodes: int
    num_devices: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The job that a scheduler starts."""

    name: str
    groups: tuple[Group, ...]
    is_cuda: bool
    program: tuple[str, ...]
    folder: str
    python: str
    environment: Environment
    options: Mapping[str, str]

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.groups)


def job_spec(
    cluster: Cluster,
    argv: Sequence[str],
    settings: JobSettings,
    *,
    python: str,
    known: Sequence[str] | None = None,
) -> JobSpec:
    """Return the job of a cluster, whose nodes must share folder, interpreter and variables."""
    options, environment = settings.get("options", {}), settings.get("environment", ())
    nodes = cluster.machines()
    starts = [node.start.over(cluster.start) for node in nodes]
    for node, start in zip(nodes, starts, strict=True):
        if start != starts[0]:
            raise ClusterError(
                f"nodes {nodes[0].name} and {node.name} have different start settings;"
                " a job file has one for all nodes",
                where=f"node {node.name}",
                hint="start: {…} at the top of the cluster file",
            )
    kinds = {node.device.kind for node in nodes}
    if len(kinds) > 1:
        raise ClusterError(
            "a job cannot mix nodes with and without GPUs", hint="one cluster file for each kind"
        )
    for option, value in options.items():
        if known is not None and option not in known:
            raise ClusterError(f"unknown option {option!r}", hint=", ".join(known))
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", option) or not value.isprintable():
            raise ClusterError(
                f"{option}={value!r} is not a valid option", hint="--option partition=gpu"
            )
    return JobSpec(
        name=job_name(settings.get("name") or cluster.name),
        groups=_groups([node.count for node in nodes]),
        is_cuda=kinds == {"cuda"},
        program=rank_program(argv),
        folder=starts[0].folder,
        python=starts[0].python or python,
        environment=tuple(dict([UNBUFFERED, *starts[0].environment, *environment]).items()),
        options=options,
    )


def job_name(text: str) -> str:
    """Return a name valid in every scheduler: at most 40 lower-case letters, digits and hyphens.

    >>> job_name("My lab's $(job)")
    'my-lab-s-job'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "shardwise"


def _template(name: str) -> str:
    return resources.files("shardwise.launch").joinpath(name).read_text("utf-8")


def _groups(counts: Sequence[int]) -> tuple[Group, ...]:
    groups, first = [], 0
    for num_devices, equal in itertools.groupby(counts):
        num_nodes = len(list(equal))
        groups.append(Group(num_nodes=num_nodes, num_devices=num_devices, first=first))
        first += num_nodes
    return tuple(groups)


# ------------------------------------------------------------ Slurm
# Groups of nodes with different numbers of devices are the components of a heterogeneous job, each
# with its own step. Ranks rendezvous on the first node that Slurm allocates.
STEP = """\
srun {het}--ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --label \\
    bash -c "$node" node {first} {devices} "$python" "${{program[@]}}" &
steps+=($!)"""
ANY_PORT = "$((20000 + SLURM_JOB_ID % 20000))  # distinct for jobs that share a node"


def slurm_script(cluster: Cluster, argv: Sequence[str], **settings: Unpack[JobSettings]) -> str:
    """Return a script for `sbatch`, with its options, such as `{"partition": "gpu"}`.

    With port 0, the port follows from the job's number.
    """
    job = job_spec(cluster, argv, settings, python="python3")
    commands = [f"export {key}={shlex.quote(value)}" for key, value in job.environment]
    commands += [f"cd {quoted_path(job.folder)}"] if job.folder else []
    return _template("slurm.sh.txt").format(
        nodes=job.num_nodes,
        ranks=cluster.num_ranks,
        header=_header(job),
        settings="\n".join(commands),
        port=settings.get("port") or ANY_PORT,
        python=quoted_path(job.python),
        program=shlex.join(job.program),
        steps="\n".join(
            STEP.format(
                het=f"--het-group={index} " if len(job.groups) > 1 else "",
                nodes=group.num_nodes,
                first=group.first,
                devices=group.num_devices,
            )
            for index, group in enumerate(job.groups)
        ),
    )


def _header(job: JobSpec) -> str:
    amount = "gpus-per-node" if job.is_cuda else "cpus-per-task"
    components = []
    for group in job.groups:
        sizes = {"nodes": group.num_nodes, "ntasks-per-node": 1, amount: group.num_devices}
        options = {key: str(size) for key, size in sizes.items()} | dict(job.options)
        components.append("\n".join(f"#SBATCH --{k}={_value(v)}" for k, v in options.items()))
    return f"#SBATCH --job-name={job.name}\n" + "\n#SBATCH hetjob\n".join(components)


def _value(text: str) -> str:
    """Quote a value for sbatch, which splits words and reads quotes as a shell does."""
    plain = text and all(c.isalnum() or c in "-_.,:;/@%+=[]*" for c in text)
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ------------------------------------------------------------ Kubernetes
# The PyTorchJob operator (kubeflow.org/v1) sets RANK (the node's number), MASTER_ADDR and
# MASTER_PORT in each pod; torchrun numbers the ranks.
KUBERNETES_OPTIONS = ("image", "namespace", "gpu-resource", "shared-memory", "memory")
DEFAULT_IMAGE = "shardwise:latest"  # built from this repository's Dockerfile
PORT_NAME = "pytorchjob-port"  # required by the operator


def pytorch_job(cluster: Cluster, argv: Sequence[str], **settings: Unpack[JobSettings]) -> str:
    """Return a PyTorchJob as YAML; `options`: image, namespace, gpu-resource, memory, …."""
    job = job_spec(cluster, argv, settings, python="python", known=KUBERNETES_OPTIONS)
    for path in (job.folder, job.python):
        if path.startswith("~"):
            raise ClusterError(f"{path}: a container has no home folder", hint="start: {…: /work}")
    groups = job.groups
    if len(groups) > 2 or (len(groups) == 2 and groups[0].num_nodes != 1):
        counts = ", ".join(f"{group.num_nodes} x {group.num_devices}" for group in groups)
        raise ClusterError(
            f"nodes of {counts} devices: a PyTorchJob has one template for the first node and one"
            " for all others",
            hint="list the node that differs first; or --to slurm, --to ray",
        )
    port = settings.get("port") or cluster.port
    replicas = {"Master": _replica(job, 1, groups[0].num_devices, port)}
    if job.num_nodes > 1:
        replicas["Worker"] = _replica(job, job.num_nodes - 1, groups[-1].num_devices, port)
    metadata = {"name": job.name}
    if "namespace" in job.options:
        metadata["namespace"] = job.options["namespace"]
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},  # a failed pod stops the others
            "pytorchReplicaSpecs": replicas,
        },
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _replica(job: JobSpec, replicas: int, num_devices: int, port: int) -> dict[str, Any]:
    options = job.options
    amount = options.get("gpu-resource", "nvidia.com/gpu") if job.is_cuda else "cpu"
    limits: dict[str, Any] = {amount: num_devices}
    if "memory" in options:
        limits |= {"memory": options["memory"]}
    shared = {"medium": "Memory"}
    if "shared-memory" in options:
        shared |= {"sizeLimit": options["shared-memory"]}
    container = {
        "name": "pytorch",  # required by the operator
        "image": options.get("image", DEFAULT_IMAGE),
        "command": [literal(job.python), "-m", "torch.distributed.run"],
        "args": [
            *torchrun_arguments(job.num_nodes, num_devices, "$(RANK)"),
            *("--master-addr", "$(MASTER_ADDR)", "--master-port", "$(MASTER_PORT)"),
            *map(literal, job.program),
        ],
        "env": [{"name": key, "value": literal(value)} for key, value in job.environment],
        "ports": [{"name": PORT_NAME, "containerPort": port}],
        "resources": {"limits": limits},
        # NCCL and data loaders need more shared memory than a container's default of 64 MiB.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if job.folder:
        container["workingDir"] = job.folder
    pod = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": shared}]}
    return {"replicas": replicas, "restartPolicy": "Never", "template": {"spec": pod}}


def literal(text: str) -> str:
    """Escape text for Kubernetes, which expands `$(NAME)` and turns `$$` into `$`.

    >>> literal("$(HOME) costs $5")
    '$$(HOME) costs $$5'
    """
    return text.replace("$", "$$")


# ------------------------------------------------------------ Ray
RAY_OPTIONS = ("address", "timeout_s")
PLACEHOLDER = '"JOB"'  # of the job in the driver's template


def ray_driver(cluster: Cluster, argv: Sequence[str], **settings: Unpack[JobSettings]) -> str:
    """Return a driver script, which needs only `ray` and `torch`.

    `options`: `address` of the Ray cluster, `timeout_s` for its nodes. With port 0, the first node
    selects a free one.
    """
    job = job_spec(cluster, argv, settings, python="", known=RAY_OPTIONS)
    timeout_s = job.options.get("timeout_s", "600")
    if not timeout_s.isdigit():
        raise ClusterError(
            f"timeout_s={timeout_s!r} is not an integer", hint="--option timeout_s=600"
        )
    driver = {
        "address": job.options.get("address", "auto"),
        "resource": "GPU" if job.is_cuda else "CPU",
        "devices": [group.num_devices for group in job.groups for _ in range(group.num_nodes)],
        "port": settings.get("port", 0),
        "program": list(job.program),
        "folder": job.folder,
        "python": job.python,
        "environment": dict(job.environment),
        "timeout_s": int(timeout_s),
    }
    # JSON inside a Python string literal: no value of the job can become code.
    return _template("ray_driver.py.txt").replace(PLACEHOLDER, repr(json.dumps(driver)), 1)
