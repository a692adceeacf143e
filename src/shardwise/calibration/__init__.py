"""Predictions of published measurements: how far the cost model can be trusted.

Enters: a CSV file of configurations measured by others. Leaves: an `Outcome` for every row and a
`Summary` of the errors.
"""

from shardwise.calibration.predict import predict_entry, predict_file
from shardwise.calibration.rows import Entry, Row, read_entries
from shardwise.calibration.statistics import Outcome, Summary, summarize

__all__ = [
    "Entry",
    "Outcome",
    "Row",
    "Summary",
    "predict_entry",
    "predict_file",
    "read_entries",
    "summarize",
]
