"""The command line of the differential fuzzer; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from pathlib import Path

from benchmarks.differential import report
from benchmarks.differential.running import Outcome, run
from benchmarks.differential.scripts import Script, generate
from tests.support.pool import Pool


def main() -> None:
    """Run the scripts that the command line asks for, and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.differential")
    parser.add_argument("--scripts", type=int, default=500, help="how many scripts")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first script")
    parser.add_argument("--workers", type=int, default=2, help="scripts run at the same time")
    parser.add_argument("--feature", help="only scripts with this feature")
    parser.add_argument("--only", type=int, metavar="SEED", help="run one script, with traceback")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one script and stop")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args()
    if options.show is not None:
        print(generate(options.show).source)
        return
    first = options.seed if options.only is None else options.only
    count = options.scripts if options.only is None else 1
    scripts = [generate(seed) for seed in range(first, first + count)]
    if options.feature:
        scripts = [script for script in scripts if options.feature in script.features]
    began = time.monotonic()
    outcomes = run_all(scripts, options.workers)
    seconds = time.monotonic() - began
    print(report.table(outcomes))
    print(report.failures(outcomes))
    if options.only is not None:
        print(outcomes[0].verdict, outcomes[0].detail, outcomes[0].trace, sep="\n")
    print(f"{len(outcomes)} scripts in {seconds:.0f} s")
    if options.json:
        document = report.document(outcomes, seconds)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(not outcome.ok for outcome in outcomes))


def run_all(scripts: list[Script], workers: int) -> list[Outcome]:
    """Run scripts on `workers` pools of ranks at once; outcomes in the order of the scripts.

    A worker keeps its pool for scripts with the same number of ranks as long as there are any.
    """
    queues: dict[int, deque[Script]] = defaultdict(deque)
    for script in scripts:
        queues[script.ranks].append(script)
    outcomes: dict[int, Outcome] = {}
    lock = threading.Lock()

    def take(ranks: int) -> Script | None:
        with lock:
            own = queues[ranks]
            queue = own if own else max(queues.values(), key=len)
            return queue.popleft() if queue else None

    def work(index: int, folder: Path) -> None:
        pool = Pool(sorted(queues)[index % len(queues)])
        try:
            while (script := take(pool.num_ranks)) is not None:
                if script.ranks != pool.num_ranks:
                    pool.close()
                    pool = Pool(script.ranks)
                outcome = run(script, pool, folder)
                with lock:
                    outcomes[script.seed] = outcome
                    _show_progress(outcome, len(outcomes), len(scripts))
        finally:
            pool.close()

    with tempfile.TemporaryDirectory(prefix="differential-") as folder:
        threads = [
            threading.Thread(target=work, args=(index, Path(folder)))
            for index in range(min(workers, len(scripts)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [outcomes[script.seed] for script in scripts if script.seed in outcomes]


def _show_progress(outcome: Outcome, done: int, total: int) -> None:
    if not outcome.ok or done % 25 == 0:
        print(f"[{done}/{total}] {outcome.verdict}: {outcome.script}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
