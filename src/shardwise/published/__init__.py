"""Predict published measurements, to show how far the cost model can be trusted.

Every row of a CSV file has an `Outcome`; a `Summary` has the errors.
"""

from shardwise.published.predict import predict_entry, predict_file
from shardwise.published.report import Outcome, Summary, summarize
from shardwise.published.rows import Entry, Row, read_entries
