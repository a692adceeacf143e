"""Emitted source as a module of this process.

The text is compiled from memory and known to `linecache`, so tracebacks show its lines; nothing is
read from disk.
"""

from __future__ import annotations

import hashlib
import linecache
import types
import weakref
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ProgramError

FILENAME = "<shardwise program "  # how the file names of emitted code begin


def load(source: str, functions: Mapping[str, Any] | None = None) -> types.ModuleType:
    """The module that `source` defines. `functions` holds classes that cannot be imported."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"{FILENAME}{digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(f"shardwise_program_{digest}")
    module.__dict__["FUNCTIONS"] = dict(functions or {})
    try:
        exec(compile(source, filename, "exec"), module.__dict__)  # our own text
    except SyntaxError as error:
        raise ProgramError(f"the emitted code is not valid Python: {error}") from error
    if "Model" in module.__dict__:  # the text is needed as long as the program
        weakref.finalize(module.__dict__["Model"], linecache.cache.pop, filename, None)
    return module
