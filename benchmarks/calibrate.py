"""Fit the efficiency of devices to published measurements, and validate it on held-out rows.

    python -m benchmarks.calibrate [--csv ../shared/data/published_calibration.csv] [--hold-out]

For each kind of device of `shardwise.published.machines`, fit four factors (products, attention,
memory, links) so that the simulated step times of its rows match the published ones. Residuals are
logarithms of predicted over published times, with a loss that grows linearly beyond 5%. A prior of
width 10% around the current value keeps factors that the rows do not determine. The better of two
values for the slowdown of computing during communication is selected.

`--hold-out` instead predicts each source with a fit to all others. These fits do not use the
current factors: their starting point and prior are the same for all kinds. Rows of kinds that only
that source measured are not counted. Either takes about 20 minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shardwise.published import Entry, read_entries
from shardwise.published.machines import TABLES, Achieved, cluster_of, read_device
from shardwise.published.predict import predict_row
from shardwise.published.report import Errors, errors_of

SHARED = Path("../shared/data/published_calibration.csv")
NAMES = ("matmul", "attention", "memory", "link")
OVERLAP_LOSSES = (0.5, 1.0)
LINEAR_BEYOND = 0.05
WIDTH = 0.1
UNINFORMED = Achieved(matmul=0.85, attention=0.6, memory=0.7, link=1.0)


def main() -> None:
    """Fit every kind of device, or validate the fits with `--hold-out`."""
    arguments = _arguments()
    entries = [e for e in read_entries(arguments.csv) if e.row is not None and e.step_time_s]
    for kind, start in TABLES.achieved.items() if not arguments.hold_out else ():
        rows = [e for e in entries if _kind(e) == kind]
        fitted = fit(rows, start)
        print(kind, {k: round(v, 3) for k, v in asdict(fitted).items()})
        print("  before", _text(errors_of(_errors(rows, start))))
        print("  after ", _text(errors_of(_errors(rows, fitted))), flush=True)
    for source in dict.fromkeys(_source(e) for e in entries) if arguments.hold_out else ():
        errors = list(_held_out(entries, source))
        print(f"without {source}: {_text(errors_of(errors))}", flush=True)


def fit(rows: Sequence[Entry], start: Achieved) -> Achieved:
    """Return the factors that fit the rows best, with either slowdown during communication."""
    if not rows:
        return start
    first = np.log([getattr(start, name) for name in NAMES])

    def residuals(logs: NDArray[np.float64], loss: float) -> NDArray[np.float64]:
        data = np.log1p(_errors(rows, _reached(logs, loss)))
        return np.concatenate([data, LINEAR_BEYOND * (logs - first) / WIDTH])

    fits = {
        loss: least_squares(
            residuals,
            first,
            args=(loss,),
            loss="soft_l1",
            f_scale=LINEAR_BEYOND,
            diff_step=0.02,
            max_nfev=6,
        )
        for loss in OVERLAP_LOSSES
    }
    best = min(fits, key=lambda loss: (round(fits[loss].cost, 6), loss))
    return _reached(fits[best].x, best)


def _held_out(entries: Sequence[Entry], source: str) -> Sequence[float]:
    errors: list[float] = []
    held_out = [e for e in entries if _source(e) == source]
    for kind in dict.fromkeys(_kind(e) for e in held_out):
        others = [e for e in entries if _kind(e) == kind and _source(e) != source]
        if not others:
            continue
        fitted = fit(others, UNINFORMED)
        errors += _errors([e for e in held_out if _kind(e) == kind], fitted)
    return errors


def _errors(rows: Sequence[Entry], reached: Achieved) -> list[float]:
    errors = []
    for entry in rows:
        assert entry.row is not None
        assert entry.step_time_s is not None
        seconds, _ = predict_row(entry.row, cluster_of(entry.row, reached))
        errors.append(seconds / entry.step_time_s - 1)
    return errors


def _reached(logs: NDArray[np.float64], overlap_loss: float) -> Achieved:
    factors = dict(zip(NAMES, map(float, np.exp(logs)), strict=True))
    return Achieved(**factors, overlap_loss=overlap_loss)


def _kind(entry: Entry) -> str:
    assert entry.row is not None
    return read_device(entry.row.gpu).name


def _source(entry: Entry) -> str:
    return entry.row_id.partition(":")[0]


def _text(errors: Errors | None) -> str:
    if errors is None:
        return "no rows"
    return (
        f"{errors.count} rows, bias {errors.bias:+.1%}, median {errors.median:.1%}, "
        f"p90 {errors.p90:.1%}, largest {errors.largest:.1%}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csv", type=Path, default=SHARED)
    parser.add_argument("--hold-out", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
