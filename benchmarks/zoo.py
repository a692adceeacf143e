"""Verify every model of the zoo under every strategy, and train some on real processes.

    python -m benchmarks.zoo [--models llama,bert] [--strategies ddp,pipeline] [--ranks 2,4]
                             [--processes gpt2,vit | none] [--dropout 0.1] [--jobs 2]

A model is captured and run once on one device; then the emitted code of each plan runs in threads
and is compared with it in float64. Pipelines have fixed numbers of ranks and two micro-batches; a
model that couples the samples of a batch must be refused with them, and pass without. Prints a
table, and writes `zoo.json` and `zoo.md` to `zoo-results/`; `--write-docs` copies the table to
`docs/zoo.md`. The exit code is 1 if a strategy passes on fewer models than required.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import zoo_report
from benchmarks.zoo_cases import STRATEGIES, Case, Result, make_plan, ranks_of, verify
from tests.support import zoo

ON_PROCESSES = (
    "mlp resnet fused_gpt dlrm gpt2 llama qwen3 gemma2 mixtral bert t5 vit".split()  # noqa: SIM905
)
PROCESS_RANKS = {"ddp": 2, "fsdp": 2, "tensor": 2, "hybrid": 4}
PROCESS_TIMEOUT_S = 300.0


def run_model(name: str, cases: Sequence[Case], dropout: float) -> list[Result]:
    """Capture a model once and verify every case."""
    import torch

    from shardwise.batch import flatten_batch
    from shardwise.equivalence import double, run_reference
    from shardwise.equivalence.reference import draws, run_graph, widen_graph
    from shardwise.frontend import capture

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    try:
        twin, batch = double(*zoo.build(name, dropout=dropout))
        graph = widen_graph(capture(twin, batch))
        if draws(graph):
            tensors = (*twin.named_parameters(), *twin.named_buffers())
            state = {n: t.detach() for n, t in tensors}
            one = make_plan(graph, "ddp", 1)
            reference, _ = run_graph(graph, one, state, [flatten_batch(batch)[0]])
        else:
            reference = run_reference(twin, batch)
    except Exception as error:
        reason, seconds = f"capture: {zoo_report.shorten(error)}", time.perf_counter() - start
        return [Result.of(name, case, ok=False, reason=reason, seconds=seconds) for case in cases]
    return [verify(name, case, graph, reference, batch, dropout) for case in cases]


def run_on_processes(
    names: Sequence[str], strategies: Sequence[str], dropout: float
) -> Iterator[Result]:
    """Train some models on gloo processes, and compare them with one process."""
    from benchmarks import zoo_processes
    from tests.support.pool import pool

    for name in names:
        graph = zoo_processes.captured(name, dropout)
        expected = one_process(name, graph, dropout)
        for strategy in (s for s in strategies if s in PROCESS_RANKS):
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
    """Train the plain model, or with dropout the program of one rank, which has the same draws."""
    from benchmarks import zoo_processes
    from tests.support.pool import pool

    if not dropout:
        return zoo_processes.reference(name)
    plan = make_plan(graph, "ddp", 1).to_json()
    return pool(1).run(zoo_processes.train, name, plan, dropout, timeout=PROCESS_TIMEOUT_S)[0]


def run_all(options: argparse.Namespace) -> list[Result]:
    """Verify models in `--jobs` processes, then train some on gloo processes."""
    results = resumed(options) if options.resume else []
    done = {(r.model, r.strategy, r.ranks, r.where) for r in results}
    cases = [(s, n) for s in options.strategies for n in ranks_of(s, options.ranks)]
    remaining = {m: [c for c in cases if (m, *c, "threads") not in done] for m in options.models}
    remaining = {name: cases for name, cases in remaining.items() if cases}
    with progress_bar() as progress, executor(options.jobs) as jobs:
        task = progress.add_task("verify", total=len(remaining))
        futures = {
            jobs.submit(run_model, name, cases, options.dropout): name
            for name, cases in remaining.items()
        }
        for future in as_completed(futures):
            results += future.result()
            missed = sum(not r.ok for r in results)
            progress.update(task, advance=1, description=f"{futures[future]}, {missed} missed")
            write(results, options)
    trained = {m for m, _, _, where in done if where == "processes"}
    names = [n for n in options.processes if n in options.models and n not in trained]
    with progress_bar() as progress:
        task = progress.add_task("train", total=len(names) * len(PROCESS_RANKS))
        for result in run_on_processes(names, options.strategies, options.dropout):
            results.append(result)
            progress.update(task, advance=1, description=f"trained {result.model}")
            write(results, options)
    order = {name: i for i, name in enumerate(options.models)}
    return sorted(results, key=lambda r: (r.where != "threads", order.get(r.model, len(order))))


def resumed(options: argparse.Namespace) -> list[Result]:
    """Return the results of an earlier run, whose cases do not run again."""
    path = options.out / "zoo.json"
    if not path.exists():
        return []
    return [Result(**row) for row in json.loads(path.read_text())["results"]]


def progress_bar() -> Progress:
    """Return a progress bar on stderr."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=zoo_report.stderr(),
    )


def executor(jobs: int) -> ProcessPoolExecutor:
    """Return an executor of new processes."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def write(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Write `zoo.json` and `zoo.md` to the output folder."""
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
    """Read the command line."""

    def words(text: str) -> list[str]:
        return [] if text == "none" else text.split(",")

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", type=words, default=zoo.all_names())
    parser.add_argument("--strategies", type=words, default=list(STRATEGIES))
    parser.add_argument("--ranks", type=lambda t: [int(n) for n in t.split(",")], default=[2, 4])
    parser.add_argument("--processes", type=words, default=ON_PROCESSES, help="models, or none")
    parser.add_argument("--dropout", type=float, nargs="?", const=0.1, default=0.0)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--resume", action="store_true", help="keep existing results in --out")
    parser.add_argument("--out", type=Path, default=Path("zoo-results"))
    parser.add_argument("--write-docs", action="store_true", help="copy the table to docs/zoo.md")
    options = parser.parse_args()
    for names, known in ((options.models, zoo.all_names()), (options.strategies, STRATEGIES)):
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"unknown {unknown[0]!r}; known: {', '.join(known)}")
    return options


def main() -> int:
    """Run, print and write; return 1 if too few models pass."""
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
