"""`shardwise launch`: start a command on every node of a cluster, or write a job file."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.options import argument, option
from shardwise.cli.output import load_plan, require_own, write_output
from shardwise.errors import ClusterError

CONTEXT = {"allow_interspersed_args": False}  # arguments after the program belong to it


class To(StrEnum):
    """The system that starts the nodes."""

    ssh = "ssh"
    slurm = "slurm"
    kubernetes = "kubernetes"
    ray = "ray"


def launch(
    command: Annotated[
        list[str] | None,
        argument(
            "-- train.py … | -- -m MODULE … | -- shardwise train config.yaml",
            "Command that every rank runs.",
        ),
    ] = None,
    cluster: Annotated[
        str, option("--cluster -c", "Cluster file, or cpu:4 for this machine.")
    ] = "cluster.yaml",
    plan: Annotated[
        Path | None, option("--plan", "Plan file; starts only the devices that it uses.")
    ] = None,
    to: Annotated[To, option("--to", "Start with ssh, or write a job file.")] = To.ssh,
    out: Annotated[Path | None, option("--out -o", "Output file: the job.")] = None,
    port: Annotated[
        int | None, option("--port", "Rendezvous port; 0 picks a free one.", min=0, max=65535)
    ] = None,
    timeout_s: Annotated[float, option("--timeout-s", "Start-up timeout in seconds.", min=1)] = 120,
    grace_s: Annotated[
        float, option("--grace-s", "Seconds to wait before killing processes.", min=0)
    ] = 20,
    ssh_program: Annotated[
        str | None, option("--ssh-program", "SSH client, instead of ssh or the cluster file's.")
    ] = None,
    env: Annotated[
        list[str] | None,
        option("--env -e", "NAME=VALUE for every node, or NAME to copy it from here."),
    ] = None,
    job_options: Annotated[
        list[str] | None, option("--option", "NAME=VALUE for sbatch, Kubernetes (image, …) or Ray.")
    ] = None,
    name: Annotated[str | None, option("--name", "Name of the job.")] = None,
    dry_run: Annotated[bool, option("--dry-run", "Only print the commands.")] = False,
) -> None:
    """Start a command on every node of a cluster, or write a job file that does."""
    from shardwise import launch as launching
    from shardwise.cluster.presets import parse_cluster
    from shardwise.launch.hosts import Settings

    require_own(out, "job")
    nodes = parse_cluster(cluster)
    if plan is not None:
        from shardwise.simulation.estimate import check_cluster

        nodes = check_cluster(load_plan(plan), nodes)
    words, environment = command or [], _environment(env or [])
    if to is not To.ssh:
        write = {
            To.slurm: launching.slurm_script,
            To.kubernetes: launching.pytorch_job,
            To.ray: launching.ray_driver,
        }[to]
        options = dict(_pair(text) for text in job_options or [])
        job = write(
            nodes, words, name=name, port=port or 0, environment=environment, options=options
        )
        if out is None:
            typer.echo(job, nl=False)
        else:
            write_output(out, job)
            typer.echo(str(out))
        return
    if out is not None or job_options or name is not None:
        raise typer.BadParameter("--out, --option and --name are for --to slurm|kubernetes|ray")
    settings: dict[str, Any] = {
        "port": port,
        "ssh_program": ssh_program,
        "environment": environment,
        "settings": Settings(timeout_s=timeout_s, grace_s=grace_s),
    }
    if dry_run:
        for line in launching.launch_commands(nodes, words, **settings):
            typer.echo(str(line))
        return
    raise typer.Exit(launching.launch(nodes, words, **settings))


def _environment(texts: list[str]) -> tuple[tuple[str, str], ...]:
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise ClusterError(
                f"--env {name}: the variable is not set here", hint=f"--env {name}=VALUE"
            )
        values[name] = value if equals else os.environ[name]
    return tuple(values.items())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ClusterError(f"--option {text!r} has no value", hint="--option partition=gpu")
    return name, value
