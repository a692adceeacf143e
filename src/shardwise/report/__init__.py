"""Reports: what a plan does and why, whether reality followed it, and how two plans differ.

The package bears the verb's name, so it can be called as the verb: `shardwise.report(plan)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.report.document import Report


class _Verb(ModuleType):
    """This package, callable as `shardwise.report.build.report`."""

    def __call__(self, *args: Any, **options: Any) -> Report:
        from shardwise.report.build import report

        return report(*args, **options)


sys.modules[__name__].__class__ = _Verb
