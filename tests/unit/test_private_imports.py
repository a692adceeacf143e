"""List every use of torch's private modules, to check when torch is updated."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

MAYBE = re.compile(r"\btorch\.[\w.]*\b_|\btorch\._|from torch\b[^\n]*import\b([^\n(]|\([^)]*)*\b_")

# Private name -> why no public name can replace it.
ALLOWED = {
    "torch.distributed.distributed_c10d._get_default_store": "ranks must agree before a collective",
    "torch.cuda.memory._set_allocator_settings": "torch reads the environment too early for a job",
    "torch.cuda._sleep": "a message of a replay occupies a stream for as long as it would travel",
    "torch.overrides._get_current_function_mode_stack": "graphs made under a mode are not cached",
    "torch._assert_async": "indices are checked on a device without waiting for it",
    "torch.ops.aten._scaled_dot_product_flash_attention": "a ring needs the logs",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "a ring needs the logs",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "a ring needs the logs",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "a ring needs the logs",
    "torch._VF": "recurrent layers call their kernels through it; packed ones are replaced",
    "torch._C": "DisableTorchFunctionSubclass, to detach a subclass, has no public name",
    "torch._ops": "OpOverload, the type of what a graph calls, has no public name",
    "torch._subclasses": "FakeTensorMode, which capture traces under, has no public name",
    "torch.utils._python_dispatch": "capture evaluates constants outside of the trace",
    "torch.utils._pytree": "torch.export describes its inputs and outputs by pytrees",
}


def private_imports(path: Path) -> set[str]:
    """Return the imported names of torch with a component that starts with one underscore."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {private_part(name) for name in names if is_private(name)}


def is_private(name: str) -> bool:
    root, *parts = name.split(".")
    return root == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts)


def private_part(name: str) -> str:
    """Return a name up to its first private component: `torch.a._b` for `torch.a._b.c`."""
    parts = name.split(".")
    first = next(i for i, p in enumerate(parts) if p.startswith("_") and not p.startswith("__"))
    return ".".join(parts[: first + 1])


@functools.cache
def uses() -> dict[str, list[str]]:
    """Return the files that use each private name."""
    files: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if not MAYBE.search(path.read_text()):  # parsing all files takes seconds
            continue
        for name in private_imports(path):
            files.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    return files


def test_private_torch_names_are_listed_with_a_reason() -> None:
    assert {name: files for name, files in uses().items() if name not in ALLOWED} == {}


def test_every_listed_name_is_used() -> None:
    assert set(ALLOWED) - set(uses()) == set()
    assert all(ALLOWED.values())
