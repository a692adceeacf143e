"""A driver script for Ray.

Enters: `Cluster` and the command of each rank. Leaves: a Python file that asks Ray for one bundle
per node, starts torchrun in each, and ends all when one fails. It needs `ray` and `torch` alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources

from shardwise.cluster import Cluster
from shardwise.errors import ClusterError
from shardwise.launch.jobs import NO_OPTIONS, job_spec
from shardwise.launch.places import Environment

OPTIONS = ("address", "timeout_s")
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
        if option not in OPTIONS:
            raise ClusterError(f"no option {option!r} for Ray", hint=", ".join(OPTIONS))
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
