"""Predict published measurements to show how far the cost model can be trusted: an `Outcome` for
every row of a CSV file, and a `Summary` of the errors.
"""

from shardwise.published.predict import predict_entry, predict_file
from shardwise.published.report import Outcome, Summary, summarize
from shardwise.published.rows import Entry, Row, read_entries

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
