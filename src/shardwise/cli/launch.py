"""`shardwise launch`: starts a command on every node of a cluster, or writes a job file.

Enters: what was typed. Leaves: the nodes' output with their names; the exit code of the launch.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import require_own
from shardwise.errors import ClusterError

if TYPE_CHECKING:
    from shardwise.cluster import Cluster

CONTEXT = {"allow_interspersed_args": False}  # what follows the program is the program's


class To(StrEnum):
    """Who starts the nodes."""

    ssh = "ssh"
    slurm = "slurm"
    kubernetes = "kubernetes"
    ray = "ray"


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- train.py … | -- -m MODULE … | -- shardwise train config.yaml",
            help="What every rank runs.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A cluster file; or cpu:4 for this machine.")
    ] = "cluster.yaml",
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="A plan's file: start only the devices that it uses."),
    ] = None,
    to: Annotated[To, typer.Option("--to", help="Start by ssh, or write a job file.")] = To.ssh,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file: the job.")] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Rendezvous port; 0 picks a free one."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="Start-up timeout in seconds.")
    ] = 120,
    grace_s: Annotated[
        float, typer.Option("--grace-s", min=0, help="Seconds to wait before killing processes.")
    ] = 20,
    ssh_program: Annotated[
        str | None,
        typer.Option("--ssh-program", help="SSH client, instead of ssh or the cluster file's."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", help="NAME=VALUE for every node; NAME: its value here."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="NAME=VALUE of sbatch, Kubernetes (image, …) or Ray."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only.")] = False,
) -> None:
    """Start a command on every node of a cluster, or write a job file that does."""
    from shardwise import launch as launching
    from shardwise.launch.hosts import Settings

    require_own(out, "job")
    machines = _cluster(cluster)
    if plan is not None:
        from shardwise.cli.output import load_plan
        from shardwise.simulation.estimate import check_cluster

        machines = check_cluster(load_plan(plan), machines)
    words, environment = command or [], _environment(env or [])
    if to is not To.ssh:
        _write(_job(to, machines, words, name, port, environment, option or []), out)
        return
    if out is not None or option or name is not None:
        raise typer.BadParameter("--out, --option and --name are for --to slurm|kubernetes|ray")
    how: dict[str, Any] = {
        "port": port,
        "ssh_program": ssh_program,
        "environment": environment,
        "settings": Settings(timeout_s=timeout_s, grace_s=grace_s),
    }
    if dry_run:
        for line in launching.launch_commands(machines, words, **how):
            typer.echo(str(line))
        return
    raise typer.Exit(launching.launch(machines, words, **how))


def _job(
    to: To,
    machines: Cluster,
    words: list[str],
    name: str | None,
    port: int | None,
    environment: tuple[tuple[str, str], ...],
    options: list[str],
) -> str:
    """The text of a job file."""
    from shardwise import launch as launching

    write = {
        To.slurm: launching.slurm_script,
        To.kubernetes: launching.pytorch_job,
        To.ray: launching.ray_driver,
    }[to]
    chosen = dict(_pair(text, "--option partition=gpu") for text in options)
    return write(
        machines, words, name=name, port=port or 0, environment=environment, options=chosen
    )


def _cluster(text: str) -> Cluster:
    """A file is read without what estimates need: a launch begins at once."""
    from shardwise.cluster import Cluster

    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return Cluster.load(path)
    from shardwise.cli.options import cluster_of

    return cluster_of(text)


def _environment(given: list[str]) -> tuple[tuple[str, str], ...]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise ClusterError(f"--env {name}: no such variable here", hint=f"--env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return tuple(found.items())


def _pair(text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ClusterError(f"--option {text!r} has no value", hint=example)
    return name, value


def _write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
        return
    from shardwise.reports.sections import write_whole

    write_whole(out, text)
    typer.echo(str(out))
