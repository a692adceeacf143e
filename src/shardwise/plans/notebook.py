"""A plan in a notebook: a verdict in a line, and its report in a frame.

Enters: a `Plan`. Leaves: HTML for `_repr_html_`; the plan's text where it has no figures.
"""

from __future__ import annotations

import html
from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan


def plan_html(plan: Plan) -> str:
    """Return the verdict and the report of a plan that was searched for; else its text."""
    build = import_module("shardwise.reporting.build")  # in a layer above this one
    try:
        report = build.report(plan)
        verdict = report.verdict
        text = (
            f"{report.title}: {verdict.plan}; a step takes {verdict.step_time_s * 1e3:,.2f} "
            f"ms, {verdict.rows_per_s:,.1f} samples/s; {verdict.limit['text']}"
        )
        return f"<p>{html.escape(text)}</p>{report._repr_html_()}"
    except ShardwiseError:  # no figures, or those of another plan
        return f"<pre>{html.escape(str(plan))}</pre>"
