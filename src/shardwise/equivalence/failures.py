"""Which statement of emitted code raised.

Enters: an exception of a probed program. Leaves: text that names the statement and its node.
"""

from __future__ import annotations

import linecache
import re
import traceback

from shardwise.equivalence.blame import Blame
from shardwise.program import Program

PROBE = re.compile(r"rt\.probe\('([^']+)'")


def failed_statement(program: Program, error: BaseException, blame: Blame) -> str:
    """Return the statement in emitted code where an exception came from, and the node it belongs
    to.
    """
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith("<shardwise program") and f.lineno is not None
    ]
    if not frames:
        return f"the program stopped outside its own statements: {type(error).__name__}: {message}"
    line = frames[-1].lineno or 0
    statement = linecache.getline(frames[-1].filename, line).strip()
    value = _probed_after(frames[-1].filename, line)
    step = next((s for s in program.rank_programs[0].steps if value in s.outputs), None)
    where = f" of {blame.step_text(step)}" if step else ""
    entries = f"; plan: {blame.entries(blame.nodes[step.node])}" if step and step.node else ""
    return f"`{statement}`{where} raised {type(error).__name__}: {message}{entries}"


def _probed_after(filename: str, line: int) -> str | None:
    """Return the value that the statement at a line makes: the next one probed."""
    for number in range(line, line + 40):
        found = PROBE.search(linecache.getline(filename, number))
        if found:
            return found.group(1)
    return None
