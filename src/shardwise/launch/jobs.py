"""What the job files of schedulers have in common."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

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


# A job script for Slurm.
#
# Nodes of unequal numbers of devices are the components of a heterogeneous job, each started by a
# step of its own; ranks meet on the first node that Slurm gives.


SCRIPT = """\
#!/bin/bash
# {nodes} nodes, {ranks} ranks. Submit with: sbatch FILE
{header}
set -euo pipefail
{settings}
hosts=$(scontrol show hostnames "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}")
export SHARDWISE_MASTER=${{hosts%%$'\\n'*}}
export SHARDWISE_PORT={port}
python={python}
program=({program})

# On each node: FIRST is the number of its step's first node, then the step's devices per node.
node='first=$1 devices=$2 python=$3; shift 3
exec "$python" -m torch.distributed.run --nnodes {nodes} --nproc-per-node "$devices" \\
    --node-rank "$((first + SLURM_PROCID))" \\
    --master-addr "$SHARDWISE_MASTER" --master-port "$SHARDWISE_PORT" "$@"'

steps=()
trap 'kill -TERM "${{steps[@]}}" 2>/dev/null || true' TERM INT
{steps}
# The first step that fails ends the others.
code=0
for _ in "${{steps[@]}}"; do
    wait -n || code=$?
    if [ "$code" -ne 0 ]; then
        kill -TERM "${{steps[@]}}" 2>/dev/null || true
        break
    fi
done
wait
exit "$code"
"""
STEP = """\
srun {het}--ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --label \\
    bash -c "$node" node {first} {devices} "$python" "${{program[@]}}" &
steps+=($!)"""
ANY_PORT = "$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node do not meet"


def slurm_script(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    name: str | None = None,
    port: int = 0,
    environment: Environment = (),
    options: Mapping[str, str] = NO_OPTIONS,
) -> str:
    """Return the script for `sbatch`; `options` are its own: `{"partition": "gpu", "time":
    "2:00:00"}`.

    Port 0 is chosen from the job's number.
    """
    job = job_spec(cluster, argv, name=name, environment=environment, options=options)
    settings = [f"export {key}={shlex.quote(value)}" for key, value in job.environment]
    settings += [f"cd {quoted_path(job.folder)}"] if job.folder else []
    return SCRIPT.format(
        nodes=job.num_nodes,
        ranks=cluster.num_ranks,
        header=_header(job),
        settings="\n".join(settings),
        port=port or ANY_PORT,
        python=quoted_path(job.python),
        program=shlex.join(job.program),
        steps="\n".join(_step(job, index) for index in range(len(job.groups))),
    )


def _header(job: JobSpec) -> str:
    common = [f"#SBATCH --job-name={job.name}"]
    components = [_component(job, group) for group in job.groups]
    return "\n".join(common + "\n#SBATCH hetjob\n".join(components).split("\n"))


def _component(job: JobSpec, group: Group) -> str:
    amount = "gpus-per-node" if job.is_cuda else "cpus-per-task"
    own = {"nodes": str(group.num_nodes), "ntasks-per-node": "1", amount: str(group.num_devices)}
    return "\n".join(f"#SBATCH --{key}={_value(v)}" for key, v in (own | dict(job.options)).items())


def _value(text: str) -> str:
    """As sbatch reads it: words, with quotes and backslashes as in a shell."""
    plain = text and all(c.isalnum() or c in "-_.,:;/@%+=[]*" for c in text)
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _step(job: JobSpec, index: int) -> str:
    group = job.groups[index]
    return STEP.format(
        het=f"--het-group={index} " if len(job.groups) > 1 else "",
        nodes=group.num_nodes,
        first=group.first,
        devices=group.num_devices,
    )


# A PyTorchJob (kubeflow.org/v1) for Kubernetes.
#
# The operator gives each pod RANK (the node's number), MASTER_ADDR and MASTER_PORT; ranks are
# torchrun's.


KUBERNETES_OPTIONS = ("image", "namespace", "gpu-resource", "shared-memory", "memory")
DEFAULT_IMAGE = "shardwise:latest"  # of this repository's Dockerfile
PORT_NAME = "pytorchjob-port"  # by which the operator finds it


def pytorch_job(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    name: str | None = None,
    port: int = 0,
    environment: Environment = (),
    options: Mapping[str, str] = NO_OPTIONS,
) -> str:
    """Return the job's YAML; `options`: image, namespace, gpu-resource, memory, shared-memory."""
    for option in options:
        if option not in KUBERNETES_OPTIONS:
            raise ClusterError(
                f"no option {option!r} for Kubernetes", hint=", ".join(KUBERNETES_OPTIONS)
            )
    job = job_spec(
        cluster, argv, name=name, python="python", environment=environment, options=options
    )
    for path in (job.folder, job.python):
        if path.startswith("~"):
            raise ClusterError(
                f"{path}: a container has no home to begin at", hint="start: {…: /work}"
            )
    groups = job.groups
    if len(groups) > 2 or (len(groups) == 2 and groups[0].num_nodes != 1):
        counts = ", ".join(f"{group.num_nodes} x {group.num_devices}" for group in groups)
        raise ClusterError(
            f"nodes of {counts} devices: a PyTorchJob has one template for the first node and one"
            " for all others",
            hint="the odd node first in the file; or --to slurm, --to ray",
        )
    replicas = {"Master": _replica(job, 1, groups[0].num_devices, port or cluster.port)}
    if job.num_nodes > 1:
        last = groups[-1].num_devices
        replicas["Worker"] = _replica(job, job.num_nodes - 1, last, port or cluster.port)
    metadata = {"name": job.name}
    if "namespace" in options:
        metadata["namespace"] = options["namespace"]
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},  # one failed pod ends the others
            "pytorchReplicaSpecs": replicas,
        },
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _replica(job: JobSpec, replicas: int, num_devices: int, port: int) -> dict[str, Any]:
    options = dict(job.options)
    amount = options.get("gpu-resource", "nvidia.com/gpu") if job.is_cuda else "cpu"
    limits: dict[str, Any] = {amount: num_devices}
    if "memory" in options:
        limits |= {"memory": options["memory"]}
    shared = {"medium": "Memory"}
    if "shared-memory" in options:
        shared |= {"sizeLimit": options["shared-memory"]}
    container = {
        "name": "pytorch",  # by which the operator finds it
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
        # NCCL and data loaders exchange through shared memory; a container has 64 MiB of it.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if job.folder:
        container["workingDir"] = job.folder
    volumes = [{"name": "shm", "emptyDir": shared}]
    return {
        "replicas": replicas,
        "restartPolicy": "Never",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }


def literal(text: str) -> str:
    """Text that Kubernetes takes as it is: it replaces `$(NAME)`, and `$$` by `$`.

    >>> literal("$(HOME) costs $5")
    '$$(HOME) costs $$5'
    """
    return text.replace("$", "$$")


# A driver script for Ray.
#
# It needs `ray` and `torch` alone.


RAY_OPTIONS = ("address", "timeout_s")
MARK = '"JOB"'  # in the driver's file, where the job goes


def ray_driver(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    name: str | None = None,
    port: int = 0,
    environment: Environment = (),
    options: Mapping[str, str] = NO_OPTIONS,
) -> str:
    """Return the driver's text; `options`: `address` of the Ray cluster, `timeout_s` for its nodes.

    Port 0 is chosen on the first node.
    """
    for option in options:
        if option not in RAY_OPTIONS:
            raise ClusterError(f"no option {option!r} for Ray", hint=", ".join(RAY_OPTIONS))
    timeout_s = options.get("timeout_s", "600")
    if not timeout_s.isdigit():
        raise ClusterError(
            f"timeout_s={timeout_s!r} is not a whole number", hint="--option timeout_s=600"
        )
    job = job_spec(cluster, argv, name=name, python="", environment=environment, options=options)
    devices = [group.num_devices for group in job.groups for _ in range(group.num_nodes)]
    settings = {
        "address": options.get("address", "auto"),
        "resource": "GPU" if job.is_cuda else "CPU",
        "devices": devices,
        "port": port,
        "program": list(job.program),
        "folder": job.folder,
        "python": job.python,
        "environment": dict(job.environment),
        "timeout_s": int(timeout_s),
    }
    text = resources.files("shardwise.launch").joinpath("ray_driver.py.txt").read_text("utf-8")
    # A JSON text in a Python string: data, whatever it holds.
    return text.replace(MARK, repr(json.dumps(settings)), 1)
