"""Names for local variables: readable, and reused once their value is dead.

A name that is reused lets Python free the old tensor, as nested modules do when they return.
"""

from __future__ import annotations

import re

from shardwise.emit.quote import identifier


class Names:
    """Hands out names in one function; `release` makes a name free again."""

    def __init__(self, taken: tuple[str, ...] = ()) -> None:
        self.taken = set(taken)
        self.of: dict[str, str] = {}

    def __getitem__(self, value: str) -> str:
        return self.of[value]

    def __contains__(self, value: str) -> bool:
        return value in self.of

    def bind(self, value: str, wish: str) -> str:
        """Return a free name like `wish` for a value."""
        stem = identifier(wish)
        name, count = stem, 1
        while name in self.taken:
            count += 1
            name = f"{stem}{count}" if not stem[-1].isdigit() else f"{stem}_{count}"
        self.taken.add(name)
        self.of[value] = name
        return name

    def release(self, value: str) -> None:
        name = self.of.get(value)
        if name is not None:
            self.taken.discard(name)


def wish_for(outputs: int, fn: str, module: str, leaves_module: bool) -> str:
    """What to call a result: its module's last name when it is what the module returns."""
    leaf = module.rsplit(".", 1)[-1]
    if leaves_module and leaf and not leaf.isdigit() and outputs == 1:
        return leaf
    if fn.startswith("autograd_function."):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", fn.rsplit(".", 1)[1]).lower()
    name = fn.split(".")[1] if fn.count(".") else fn
    return name.strip("_") or "x"
