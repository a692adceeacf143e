"""Start one process per device on every node of a cluster, by ssh or through a job file.

`launch` runs a command on all nodes and returns its exit code, `launch_commands` returns the
commands to type, and the others write a job file for Slurm, Kubernetes or Ray. Names are imported
on first use because the modules that run on a node need only the standard library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.launch.hosts import NodeCommand, Settings, launch_commands
    from shardwise.launch.jobs import pytorch_job, ray_driver, slurm_script
    from shardwise.launch.run import launch


_MODULES = {"launch": "run"}
_MODULES |= dict.fromkeys(("NodeCommand", "Settings", "launch_commands"), "hosts")
_MODULES |= dict.fromkeys(("pytorch_job", "ray_driver", "slurm_script"), "jobs")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
