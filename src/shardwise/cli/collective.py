"""`shardwise collective`: solve, show, benchmark and choose collectives for a cluster."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import AsJson, PlanOut, argument, option
from shardwise.cli.output import echo, load_plan, require_own, write_output
from shardwise.dtypes import DTYPES
from shardwise.errors import did_you_mean

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.collectives import Network, Solution
    from shardwise.collectives.bench.benchmark import Bench, Row
    from shardwise.collectives.messages import MessageProgram
    from shardwise.collectives.messages.check import Facts
    from shardwise.plans import Plan

app = typer.Typer(no_args_is_help=True, help="Optimize collectives for the links of a cluster.")

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# Larger values are typing errors, and gloo does not support longer timeouts.
MAX_BYTES, MAX_RANKS, MAX_TIMEOUT_S = 2**60, 2**20, 10**6
ITEM_BYTES = {dtype.name: dtype.num_bytes for dtype in DTYPES.values()}
MAX_CHUNKS = 40  # listed by `show` without --rank

ClusterArgument = Annotated[str, argument("CLUSTER", "Cluster: a file, or h100:8x8.")]
Operation = Annotated[
    str, option("--op", "all_reduce, reduce_scatter, all_gather, broadcast, reduce, …")
]
Bytes = Annotated[str, option("--bytes", "Size of the data: 64MB, 16MiB, 4096.")]
Dtype = Annotated[str, option("--dtype", "Dtype of the elements.")]
Root = Annotated[int | None, option("--root", "Root rank (broadcast and reduce only).")]
Members = Annotated[str, option("--members", "Ranks of the group: 0-3,8.", show_default="all")]
Rounds = Annotated[int, option("--rounds", "Number of timed runs.", min=1)]


def _print_choices(plan: Plan) -> None:
    lines = [str(choice) for choice in plan.collectives]
    typer.echo("\n".join(lines or ["all collectives use the communication library"]))


@app.command()
def tune(
    plan_file: Annotated[Path, argument("PLAN.json", "Plan with chosen collectives.")],
    out: Annotated[Path | None, option("--out -o", "Output file: the tuned plan.")] = None,
    num_bytes: Bytes = "16MiB",
    rounds: Rounds = 3,
    timeout_s: Annotated[float, option("--timeout-s", "Timeout in seconds.")] = 60.0,
) -> None:
    """Time chunk sizes and the library on the ranks of a plan, and select the fastest.

    torchrun --no-python --nproc-per-node 4 shardwise collective tune plan.json -o tuned.json
    """
    import torch.distributed as dist

    import shardwise
    from shardwise.runtime.rendezvous import init_process_group

    size = parse_bytes(num_bytes)
    if size < 1:
        raise typer.BadParameter(f"--bytes {num_bytes}: must be positive")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise typer.BadParameter(
            f"--timeout-s {timeout_s:g}: must be above 0 and at most {MAX_TIMEOUT_S:,} seconds"
        )
    require_own(out, "plan")
    plan = load_plan(plan_file)
    if "RANK" not in os.environ:
        raise typer.BadParameter(
            f"start one process per rank: torchrun --no-python --nproc-per-node "
            f"{plan.num_ranks} shardwise collective tune {plan_file}"
        )
    init_process_group("gloo", datetime.timedelta(seconds=timeout_s))
    tuned = shardwise.collectives.tune(plan, num_bytes=size, rounds=rounds, timeout_s=timeout_s)
    if dist.get_rank() == 0:
        _print_choices(tuned)
        if out is not None:
            tuned.save(out)
    dist.barrier()
    dist.destroy_process_group()


@app.command()
def choose(
    plan_file: Annotated[Path, argument("PLAN.json", "Plan file.")],
    cluster: Annotated[str, option("--cluster -c", "The plan's cluster: a file, or h100:8x8.")],
    out: PlanOut = None,
    use: Annotated[
        str, option("--use", "Always use library, hierarchical, solved or shared.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Choose the fastest implementation of each collective of a plan by predicted time."""
    import shardwise
    from shardwise.cluster.presets import parse_cluster

    require_own(out, "plan")
    chosen = shardwise.collectives.choose(load_plan(plan_file), parse_cluster(cluster), use=use)
    if out is not None:
        chosen.save(out)
    if as_json:
        echo([choice.to_json() for choice in chosen.collectives])
    else:
        _print_choices(chosen)


@app.command()
def solve(
    cluster: ClusterArgument,
    operation: Operation = "all_reduce",
    num_bytes: Bytes = "64MB",
    dtype: Dtype = "float32",
    root: Root = None,
    members: Members = "",
    out: Annotated[Path | None, option("--out -o", "Output file: the program.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest message program, and print its time and a lower bound."""
    require_own(out, "collective")
    solution = _solve(cluster, operation, num_bytes, dtype, root, members)
    if out is not None:
        solution.program.save(out)
    echo(solution.to_json() if as_json else solution)
    if out is not None and not as_json:
        typer.echo(f"{out}: shardwise collective show {out}")


@app.command()
def show(
    source: Annotated[
        str,
        argument("PROGRAM.json|CLUSTER", "Program written by `solve -o`, or cluster to solve for."),
    ],
    operation: Operation = "all_reduce",
    num_bytes: Bytes = "64MB",
    dtype: Dtype = "float32",
    root: Root = None,
    members: Members = "",
    rank: Annotated[int | None, option("--rank", "Show only the actions of this rank.")] = None,
    picture: Annotated[Path | None, option("--svg", "Output file: a drawing of the trees.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the trees of a program, and what each rank sends, receives and adds."""
    from shardwise.collectives.messages.check import check
    from shardwise.collectives.messages.drawing import svg
    from shardwise.errors import ProgramError
    from shardwise.schema import Reader

    require_own(picture, "picture", option="--svg")
    program = _read(source) or _solve(source, operation, num_bytes, dtype, root, members).program
    if rank is not None and not 0 <= rank < program.num_ranks:
        raise typer.BadParameter(f"--rank {rank}: the program has {program.num_ranks} ranks")
    facts = Reader(ProgramError, source).construct(check, (), program)
    if picture is not None:
        write_output(picture, svg(program), option="--svg")
    echo(program.to_json() if as_json else "\n".join(_lines(program, facts, rank)))
    if picture is not None and not as_json:
        typer.echo(f"{picture}")


@app.command()
def bench(
    cluster: ClusterArgument,
    operation: Operation = "all_reduce",
    num_bytes: Annotated[str, option("--bytes", "Sizes of the data: 16MB,64MB.")] = "64MB",
    dtype: Dtype = "float32",
    root: Root = None,
    members: Members = "",
    rounds: Rounds = 5,
    emulate: Annotated[
        bool, option("--emulate", "Emulate the cluster's links (needs root).")
    ] = False,
    use: Annotated[
        str, option("--use", "solved or library.", show_default="as chosen for a plan")
    ] = "",
    timeout_s: Annotated[
        float, option("--timeout-s", "Timeout of the run in seconds.", min=1)
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Time the implementation that a plan uses against the communication library.

    Runs on the processes of torchrun, in network namespaces with the cluster's bandwidths and
    latencies (--emulate), or else in processes of this machine.
    """
    from shardwise.collectives.bench import benchmark as benches

    if use not in ("", benches.SOLVED, benches.LIBRARY):
        raise typer.BadParameter(f"--use {use!r}: {benches.SOLVED} or {benches.LIBRARY}")
    parsed, network, item_bytes = _network(cluster, dtype, members)
    sizes = [_parse_elements(size, dtype) * item_bytes for size in num_bytes.split(",")]
    if min(sizes) < item_bytes * network.num_ranks:
        raise typer.BadParameter(f"--bytes {num_bytes}: less than one {dtype} per rank")
    task = benches.Bench(
        network=network,
        operation=operation,
        sizes=sizes,
        item_bytes=item_bytes,
        dtype=dtype,
        root=root,
        rounds=rounds,
        timeout_s=timeout_s,
        uses=(lambda _: use)
        if use
        else benches.chosen(parsed, operation, [int(name) for name in network.names]),
    )
    rows = _time(task, emulate=emulate)
    if rows is None:
        return
    title = f"{operation} on {network.num_ranks} ranks of {cluster}, median of {rounds} rounds"
    echo([row.to_json() for row in rows] if as_json else "\n".join([title, *benches.table(rows)]))


def _time(task: Bench, *, emulate: bool) -> list[Row] | None:
    """Return the rows, or None on ranks that print nothing."""
    from shardwise.collectives.bench import benchmark as benches

    if emulate:
        return benches.on_emulated_hosts(task)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return benches.in_this_group(task)
    typer.echo(
        f"note: {task.network.num_ranks} processes communicate through the memory of this machine, "
        "not through the cluster's links; use --emulate to emulate them, or torchrun to run on the "
        "cluster",
        err=True,
    )
    return benches.on_this_machine(task)


def _lines(program: MessageProgram, facts: Facts, rank: int | None) -> Iterable[str]:
    from shardwise.collectives.messages.drawing import trees_text

    if rank is not None or len(program.chunks) <= MAX_CHUNKS:
        yield from program.lines(None if rank is None else [rank])
    else:
        yield program.lines([])[0]
        yield "--rank 0 lists the chunks and the actions of rank 0"
    yield ""
    yield trees_text(program)
    yield ""
    yield (
        f"checked: every rank ends with its result; at most {program.window} messages in flight "
        f"per edge, {facts.scratch_elements} elements of scratch memory per rank"
    )


def _read(source: str) -> MessageProgram | None:
    """Return the program in a file, or None if the file is something else, such as a cluster."""
    from shardwise.collectives.messages import MessageProgram
    from shardwise.errors import ProgramError
    from shardwise.files import read_json

    if Path(source).suffix != ".json":
        return None
    data = read_json(source, ProgramError, what="program")
    is_program = isinstance(data, dict) and "operation" in data
    return MessageProgram.from_json(data, source) if is_program else None


def _solve(
    cluster: str, operation: str, size: str, dtype: str, root: int | None, members: str
) -> Solution:
    from shardwise.collectives import solve

    _, network, item_bytes = _network(cluster, dtype, members)
    return solve(network, operation, _parse_elements(size, dtype), item_bytes=item_bytes, root=root)


def _network(text: str, dtype: str, members: str) -> tuple[Cluster, Network, int]:
    from shardwise.cluster.presets import parse_cluster
    from shardwise.collectives import Network

    if dtype not in ITEM_BYTES:
        raise typer.BadParameter(f"--dtype {dtype!r}{did_you_mean(dtype, ITEM_BYTES)}")
    cluster = parse_cluster(text)
    network = Network.of_cluster(cluster, parse_ranks(members) or None)
    return cluster, network, ITEM_BYTES[dtype]


def _parse_elements(size: str, dtype: str) -> int:
    num_bytes = parse_bytes(size)
    if num_bytes % ITEM_BYTES[dtype]:
        raise typer.BadParameter(
            f"--bytes {size}: {num_bytes} bytes are not a multiple of {ITEM_BYTES[dtype]}, the "
            f"size of a {dtype}"
        )
    return num_bytes // ITEM_BYTES[dtype]


def parse_bytes(text: str) -> int:
    """Parse a size with a unit into bytes.

    >>> parse_bytes("64MB"), parse_bytes("1.5 KiB"), parse_bytes("12")
    (64000000, 1536, 12)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise typer.BadParameter(f"--bytes {text!r} is not a size such as 64MB, 16MiB or 4096")
    size = Decimal(match[1]) * UNITS[match[2].upper()]
    if size != int(size):
        raise typer.BadParameter(f"--bytes {text!r} is {size} bytes, not an integer")
    if size > MAX_BYTES:
        raise typer.BadParameter(f"--bytes {text!r} is more than {MAX_BYTES >> 60} EiB")
    return int(size)


def parse_ranks(text: str) -> list[int]:
    """Parse a list of ranks and ranges.

    >>> parse_ranks("0-3,8")
    [0, 1, 2, 3, 8]
    """
    ranks: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise typer.BadParameter(f"--members {text!r} is not a list of ranks such as 0-3,8")
        if dash and int(high) < int(low):
            raise typer.BadParameter(f"--members {text!r}: {part} is empty; use {high}-{low}")
        if len(high or low) > len(str(MAX_RANKS)):
            raise typer.BadParameter(f"--members {text!r}: rank {high or low} does not exist")
        ranks += range(int(low), int(high or low) + 1)
    return ranks
