"""Every model of the zoo through every strategy, each verified; a dozen on real processes.

    python -m benchmarks.zoo [--models llama,bert] [--strategies ddp,tensor] [--ranks 2,4]
                             [--processes gpt2,vit | none] [--dropout 0.1] [--jobs 2]

A model is captured and run on one device once; then each plan's emitted code runs in threads and is
compared with it in float64. Leaves: a table on the terminal, and `zoo-results/` with `zoo.json` and
`zoo.md`; `--write-docs` copies the table to `docs/zoo.md`. Exit code 1 when a strategy passes on
fewer models than it should.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import zoo_report
from tests.support import zoo

STRATEGIES = ("ddp", "fsdp", "tensor", "hybrid")
ON_PROCESSES = (
    "mlp resnet fused_gpt dlrm gpt2 llama qwen3 gemma2 mixtral bert t5 vit".split()  # noqa: SIM905
)
PROCESS_RANKS = {"ddp": 2, "fsdp": 2, "tensor": 2, "hybrid": 4}
PROCESS_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model under one strategy: whether it equals one device, and why not."""

    model: str
    strategy: str
    ranks: int
    where: str  # "threads" or "processes"
    ok: bool
    error: float | None = None  # the largest relative error
    share: float | None = None  # of all parameter bytes, what rank 0 holds
    reason: str = ""
    seconds: float = 0.0


def run_model(
    name: str, strategies: Sequence[str], ranks: Sequence[int], dropout: float
) -> list[Result]:
    """Capture a model once and verify every strategy on every number of ranks."""
    import torch

    from shardwise.equivalence import double, run_reference
    from shardwise.equivalence.precision import widen_graph
    from shardwise.equivalence.randomness import draws, run_graph_reference
    from shardwise.frontend import capture

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [(strategy, count) for strategy in strategies for count in ranks]
    start = time.perf_counter()
    try:
        twin, batch = double(*zoo.build(name, dropout=dropout))
        graph = widen_graph(capture(twin, batch))
        if draws(graph):
            tensors = (*twin.named_parameters(), *twin.named_buffers())
            state = {n: t.detach() for n, t in tensors}
            one = make_plan(graph, "ddp", 1)
            reference = run_graph_reference(graph, one, state, batch)
        else:
            reference = run_reference(twin, batch)
    except Exception as error:
        reason, seconds = f"capture: {zoo_report.shorten(error)}", time.perf_counter() - start
        return [
            Result(
                model=name,
                strategy=s,
                ranks=n,
                where="threads",
                ok=False,
                reason=reason,
                seconds=seconds,
            )
            for s, n in cases
        ]
    return [_verify(name, graph, reference, batch, strategy, n) for strategy, n in cases]


def _verify(name: str, graph: Any, reference: Any, batch: Any, strategy: str, ranks: int) -> Result:
    import shardwise as sw
    from shardwise.equivalence import check

    start = time.perf_counter()
    known: dict[str, Any] = {"model": name, "strategy": strategy, "ranks": ranks}
    known["where"] = "threads"
    try:
        plan = make_plan(graph, strategy, ranks)
        program = sw.compile(graph, plan).lowered
        certificate = check(program, reference, batch, timeout=120.0)
    except Exception as error:
        reason = zoo_report.shorten(error)
        return Result(**known, ok=False, reason=reason, seconds=time.perf_counter() - start)
    share = parameter_share(program)
    reason = "" if certificate.ok else zoo_report.first_failure(certificate)
    ok = certificate.ok
    if strategy == "tensor" and ranks == 2 and zoo_report.is_transformer(name) and ok:
        ok = share <= zoo_report.LARGEST_SHARE
        reason = "" if ok else f"rank 0 holds {share:.2f} of the parameter bytes"
    return Result(
        **known,
        ok=ok,
        error=certificate.max_relative_error,
        share=share,
        reason=reason,
        seconds=time.perf_counter() - start,
    )


def make_plan(graph: Any, strategy: str, ranks: int) -> Any:
    """The strategy's plan; `hybrid` takes two data-parallel groups."""
    import shardwise as sw

    sizes = {"dp": 2, "tp": ranks // 2} if strategy == "hybrid" else {}
    return getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **sizes)


def parameter_share(program: Any) -> float:
    """Of all parameter bytes, what rank 0 holds."""
    import math

    held = whole = 0.0
    axes = dict(program.mesh.axes)
    for item in program.of_rank(0).parameters:
        size = math.prod(item.local_shape) * item.dtype.itemsize
        held += size / math.prod(axes[a] for a in item.sync) if item.zero == 3 else size
        whole += math.prod(item.shape) * item.dtype.itemsize
    return held / whole if whole else 0.0


def run_on_processes(
    names: Sequence[str], strategies: Sequence[str], dropout: float
) -> Iterator[Result]:
    """Train some models on gloo processes, next to one process."""
    from benchmarks import zoo_processes
    from tests.support.pool import pool

    for name in names:
        graph = zoo_processes.captured(name, dropout)
        expected = one_process(name, graph, dropout)
        for strategy in strategies:
            start = time.perf_counter()
            ranks = PROCESS_RANKS[strategy]
            error = None
            try:
                plan = make_plan(graph, strategy, ranks).to_json()
                trained = pool(ranks).run(
                    zoo_processes.train, name, plan, dropout, timeout=PROCESS_TIMEOUT_S
                )
                error, reason = zoo_processes.compare(trained, expected)
            except Exception as failure:
                reason = zoo_report.shorten(failure)
            yield Result(
                model=name,
                strategy=strategy,
                ranks=ranks,
                where="processes",
                ok=not reason,
                error=error,
                reason=reason,
                seconds=time.perf_counter() - start,
            )


def one_process(name: str, graph: Any, dropout: float) -> Any:
    """The plain model; with dropout the program of one rank, which draws what all ranks draw."""
    from benchmarks import zoo_processes
    from tests.support.pool import pool

    if not dropout:
        return zoo_processes.reference(name)
    plan = make_plan(graph, "ddp", 1).to_json()
    return pool(1).run(zoo_processes.train, name, plan, dropout, timeout=PROCESS_TIMEOUT_S)[0]


def run_all(options: argparse.Namespace) -> list[Result]:
    """All models in `--jobs` processes, then some on gloo processes, with progress on stderr."""
    results = resumed(options) if options.resume else []
    known = {(r.model, r.where) for r in results}
    names = [n for n in options.models if (n, "threads") not in known]
    with progress_bar() as progress, executor(options.jobs) as jobs:
        task = progress.add_task("verify", total=len(names))
        arguments = (options.strategies, options.ranks, options.dropout)
        futures = {jobs.submit(run_model, name, *arguments): name for name in names}
        for future in as_completed(futures):
            results += future.result()
            missed = sum(not r.ok for r in results)
            progress.update(task, advance=1, description=f"{futures[future]}, {missed} missed")
            write(results, options)
    names = [n for n in options.processes if n in options.models and (n, "processes") not in known]
    with progress_bar() as progress:
        task = progress.add_task("train", total=len(names) * len(options.strategies))
        for result in run_on_processes(names, options.strategies, options.dropout):
            results.append(result)
            progress.update(task, advance=1, description=f"trained {result.model}")
            write(results, options)
    order = {name: i for i, name in enumerate(options.models)}
    return sorted(results, key=lambda r: (r.where != "threads", order.get(r.model, len(order))))


def resumed(options: argparse.Namespace) -> list[Result]:
    """The results of an earlier run that was stopped; models without all of theirs run again."""
    path = options.out / "zoo.json"
    if not path.exists():
        return []
    found = [Result(**row) for row in json.loads(path.read_text())["results"]]
    cases = {"threads": len(options.strategies) * len(options.ranks)}
    cases["processes"] = len(options.strategies)
    counts = Counter((r.model, r.where) for r in found)
    return [r for r in found if counts[r.model, r.where] >= cases[r.where]]


def progress_bar() -> Progress:
    """A line on stderr."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=zoo_report.stderr(),
    )


def executor(jobs: int) -> ProcessPoolExecutor:
    """Fresh processes, which share nothing with this one."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def write(results: Sequence[Result], options: argparse.Namespace) -> None:
    """`zoo.json` and `zoo.md` in the output folder."""
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.zoo {' '.join(sys.argv[1:])}".strip()
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "machine": zoo_report.machine(),
        "results": [asdict(r) for r in results],
    }
    (options.out / "zoo.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / "zoo.md").write_text(zoo_report.markdown(data))


def read_options() -> argparse.Namespace:
    """The command line."""

    def words(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", type=words, default=zoo.names())
    parser.add_argument("--strategies", type=words, default=list(STRATEGIES))
    parser.add_argument("--ranks", type=lambda t: [int(n) for n in t.split(",")], default=[2, 4])
    parser.add_argument("--processes", type=words, default=ON_PROCESSES, help="models, or none")
    parser.add_argument("--dropout", type=float, nargs="?", const=0.1, default=0.0)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--resume", action="store_true", help="keep what --out already has")
    parser.add_argument("--out", type=Path, default=Path("zoo-results"))
    parser.add_argument("--write-docs", action="store_true", help="copy the table to docs/zoo.md")
    options = parser.parse_args()
    for given, known in ((options.models, zoo.names()), (options.strategies, STRATEGIES)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"unknown {unknown[0]!r}; known: {', '.join(known)}")
    return options


def main() -> int:
    """Run, print, write; 1 when too many models miss."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    options = read_options()
    results = run_all(options)
    write(results, options)
    if options.write_docs:
        Path("docs/zoo.md").write_text((options.out / "zoo.md").read_text())
    rows = [asdict(r) for r in results]
    zoo_report.show(rows)
    return 0 if zoo_report.enough(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
