"""Break guards on one rank only: `python -m benchmarks.guard_faults [--models 200] [--seed 0]`.

Every model is drawn at random and has branches on values of the batch. On 2 or 3 ranks it runs
steps on several batches that all ranks share; then one rank alone gets a batch for which another
program is chosen. All ranks must refuse that step, and go on afterwards. Only losses are compared
with one device, without optimizer steps. Prints counts; the exit code is 1 if ranks disagree, if a
rank waits for the others, or if a loss is wrong.
"""

from __future__ import annotations

import argparse
import collections
import copy
import sys

import torch

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.support.guarded import KINDS, Looking, batch, drawn_model
from tests.support.pool import pool
from tests.support.training import assert_close, error_of, plan_for

STRATEGIES = ("ddp", "fsdp", "tensor", "zero1")
TIMEOUT_S = 60.0  # of one model, with 8 captures


def outcome(model: Looking, seed: int, ranks: int) -> dict[str, int] | str:
    """Return how often ranks refused or trained together, or why the model is refused."""
    rank, counts = torch.distributed.get_rank(), collections.Counter[str]()
    reference, first = copy.deepcopy(model), batch(seed)
    try:
        plan = plan_for(model, first, STRATEGIES[seed % len(STRATEGIES)], ranks)
        pm = sw.parallelize(model, first, plan, check_batches=False)
        for other in range(seed + 1, seed + 5):
            for given in (first, batch(other)):
                assert_close(pm.train_step(given), reference(**given).detach(), f"loss of {other}")
                pm.zero_grad()
                counts["steps that equal one device"] += 1
            differs = pm.program(first) is not pm.program(batch(other))
            if not differs:
                counts["batches that break no guard"] += 1
                continue
            error = error_of(pm.train_step, batch(other) if rank == seed % ranks else first)
            if "BatchError: the batches of ranks" not in error:
                raise AssertionError(f"seed {seed}, batch {other}: {error or 'no error'}")
            pm.zero_grad()
            counts["batches of one rank refused by all"] += 1
        assert_close(pm.train_step(first), reference(**first).detach(), "loss at the end")
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return dict(counts)


def run_drawn(seed: int, ranks: int) -> dict[str, int] | str:
    """Run one drawn model."""
    return outcome(drawn_model(seed), seed, ranks)


def run_kind(kind: str, ranks: int) -> dict[str, int] | str:
    """Run the model of one kind of question."""
    return outcome(Looking(KINDS[kind]), 0, ranks)


def main() -> int:
    """Run the models, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, failures = collections.Counter[str](), 0
    cases = [(run_kind, kind, ranks) for kind in KINDS for ranks in (2, 3)]
    cases += [(run_drawn, options.seed + i, 2 + i % 2) for i in range(options.models)]  # type: ignore[misc]
    for function, case, ranks in cases:
        try:
            results = pool(ranks).run(function, case, ranks, timeout=TIMEOUT_S)
            if any(result != results[0] for result in results):
                raise AssertionError(f"ranks differ: {results}")
        except Exception as error:
            failures += 1
            print(f"{case} on {ranks} ranks: {error}", flush=True)
            continue
        counts.update({f"models on {ranks} ranks": 1})
        counts.update({results[0]: 1} if isinstance(results[0], str) else results[0])
    for text, count in sorted(counts.items()):
        print(f"{count:6} {text}")
    print(f"{failures:6} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
