"""`shardwise collective tune`: the chunks of a plan's collectives, measured on its ranks.

Enters: a plan's file, in every process that torchrun starts. Leaves: the plan with what was the
fastest, written by rank 0.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.files import load_plan
from shardwise.cli.kinds import require_own

if TYPE_CHECKING:
    from shardwise.plans import Plan

MOST_S = 10**6  # more was mistyped, and gloo cannot wait that long


def say_choices(plan: Plan) -> None:
    """Print the collectives of a plan that are not the library's."""
    for choice in plan.collectives:
        typer.echo(str(choice))
    if not plan.collectives:
        typer.echo("all collectives are the library's")


def tune(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN.json", help="A plan with choices of collectives.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output file: the tuned plan.")
    ] = None,
    num_bytes: Annotated[str, typer.Option("--bytes", help="The size of the data.")] = "16MiB",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times to run each.")] = 3,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Timeout in seconds.")] = 60.0,
) -> None:
    """Try sizes of chunks on the ranks of a plan, next to the library, and keep the fastest.

    torchrun --no-python --nproc-per-node 4 shardwise collective tune plan.json -o tuned.json
    """
    import os

    import torch.distributed as dist

    import shardwise
    from shardwise.cli.collective import bytes_of
    from shardwise.runtime.rendezvous import init_process_group

    size = bytes_of(num_bytes)
    if size < 1:
        raise typer.BadParameter(f"--bytes {num_bytes}: there is nothing to send")
    if not 0 < timeout_s <= MOST_S:
        raise typer.BadParameter(
            f"--timeout-s {timeout_s:g}: seconds, above 0 and up to {MOST_S:,}"
        )
    require_own(out, "plan")
    plan = load_plan(plan_file)
    if "RANK" not in os.environ:
        raise typer.BadParameter(
            f"the ranks of a plan tune it together: torchrun --no-python --nproc-per-node "
            f"{plan.num_ranks} shardwise collective tune {plan_file}"
        )
    init_process_group("gloo", datetime.timedelta(seconds=timeout_s))
    tuned = shardwise.collectives.tune(plan, num_bytes=size, rounds=rounds, timeout_s=timeout_s)
    if dist.get_rank() == 0:
        say_choices(tuned)
        if out is not None:
            tuned.save(out)
    dist.barrier()
    dist.destroy_process_group()
