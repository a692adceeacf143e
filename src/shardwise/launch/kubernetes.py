"""A PyTorchJob (kubeflow.org/v1) for Kubernetes.

Enters: `Cluster`, the command of each rank, and an image. Leaves: YAML. The operator gives each
pod RANK (the node's number), MASTER_ADDR and MASTER_PORT; ranks are torchrun's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from shardwise.cluster import Cluster
from shardwise.errors import ClusterError
from shardwise.launch.commands import torchrun_arguments
from shardwise.launch.jobs import NO_OPTIONS, JobSpec, job_spec
from shardwise.launch.places import Environment

OPTIONS = ("image", "namespace", "gpu-resource", "shared-memory", "memory")
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
        if option not in OPTIONS:
            raise ClusterError(f"no option {option!r} for Kubernetes", hint=", ".join(OPTIONS))
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
