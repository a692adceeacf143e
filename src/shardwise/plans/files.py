"""The text of a plan's file: decisions for people, a line each; details of reports in few lines.

Enters: what `Plan.to_json` gave. Leaves: JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def plan_file_text(data: Mapping[str, Any]) -> str:
    """Return the file; `details`, the last of `search`, which is the last of all, has long lines.

    >>> print(plan_file_text({"name": "a", "search": {"gap": 0, "details": {"links": [1, 2]}}}))
    {
      "name": "a",
      "search": {
        "gap": 0,
        "details": {
          "links": [1,2]
        }
      }
    }
    <BLANKLINE>
    """
    search = dict(data.get("search") or {})
    details = search.pop("details", None)
    if not details or not search:
        return json.dumps(data, indent=2) + "\n"
    rest = {key: value for key, value in data.items() if key != "search"}
    text = json.dumps({**rest, "search": search}, indent=2)
    lines = [f"      {json.dumps(key)}: {_line(value)}" for key, value in details.items()]
    inside = ",\n".join(lines)
    before = text.removesuffix("\n  }\n}")  # the braces of `search` and of all
    return f'{before},\n    "details": {{\n{inside}\n    }}\n  }}\n}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
