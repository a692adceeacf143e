"""Every use of torch's private modules, in one place: what to check when torch is updated."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

MAYBE = re.compile(r"\btorch\.[\w.]*\b_|\btorch\._|from torch\b[^\n]*import\b([^\n(]|\([^)]*)*\b_")

# Private name -> why there is no public way.
ALLOWED = {
    "torch.distributed.distributed_c10d._get_default_store": "ranks agree before a collective",
    "torch.cuda.memory._set_allocator_settings": "the environment is read before a job can set it",
    "torch.overrides._get_current_function_mode_stack": "graphs made under a mode are not stored",
    "torch._assert_async": "indices are checked on a device without waiting for it",
    "torch._ops": "OpOverload, the type of what a graph calls, has no public name",
    "torch._subclasses": "FakeTensorMode, which capture traces under, has no public name",
    "torch.utils._python_dispatch": "capture evaluates constants outside of the trace",
    "torch.utils._pytree": "torch.export speaks of its inputs and outputs in these pytrees",
}


def private_imports(path: Path) -> set[str]:
    """The imported names below torch with a component that starts with one underscore."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {private_part(name) for name in found if is_private(name)}


def is_private(name: str) -> bool:
    root, *rest = name.split(".")
    return root == "torch" and any(p.startswith("_") and not p.startswith("__") for p in rest)


def private_part(name: str) -> str:
    """`torch.a._b.c` -> `torch.a._b`: the name up to its first private component."""
    parts = name.split(".")
    first = next(i for i, p in enumerate(parts) if p.startswith("_") and not p.startswith("__"))
    return ".".join(parts[: first + 1])


@functools.cache
def uses() -> dict[str, list[str]]:
    """Private name -> the files that use it."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if not MAYBE.search(path.read_text()):  # reading them all as Python takes seconds
            continue
        for name in private_imports(path):
            found.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    return found


def test_private_torch_names_are_listed_with_a_reason() -> None:
    assert {name: files for name, files in uses().items() if name not in ALLOWED} == {}


def test_the_list_has_nothing_unused() -> None:
    assert set(ALLOWED) - set(uses()) == set()
    assert all(ALLOWED.values())
