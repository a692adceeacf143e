"""Starting one process per device on every node of a cluster, by ssh or by a job file.

Enters: a `Cluster` and the command that each rank runs. Leaves: running nodes and an exit code
(`launch`), the commands to type (`launch_commands`), or a job file for Slurm, Kubernetes or Ray.
Names are imported on first use: what runs on a node needs the standard library alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.launch.hosts import NodeCommand, Settings, launch_commands
    from shardwise.launch.jobs import pytorch_job, ray_driver, slurm_script
    from shardwise.launch.run import launch

__all__ = [
    "NodeCommand",
    "Settings",
    "launch",
    "launch_commands",
    "pytorch_job",
    "ray_driver",
    "slurm_script",
]

_MODULES = {
    "NodeCommand": "hosts",
    "Settings": "hosts",
    "launch": "run",
    "launch_commands": "hosts",
    "pytorch_job": "jobs",
    "ray_driver": "jobs",
    "slurm_script": "jobs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
