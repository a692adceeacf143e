"""Generated modules under `torch.compile`.

A generated program has one class for all repeated blocks with the same computation. Compiling the
`forward` of these classes takes as long as their number, not as long as that of the layers: all
blocks of a class share the code, and torch's caches on disk keep it for the next process. The few
operators outside of blocks run as they are written.

CUDA graphs replay all kernels of a pass with one launch. A step that is limited by launches, of a
small model, becomes several times as fast; its gradients are in memory that the next step reuses.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from shardwise.errors import ProgramError, did_you_mean
from shardwise.runtime.store import ParameterStore

Mode = Literal["blocks", "cuda-graph"]
Compile = bool | Mode


def check_mode(compile: Compile, device: torch.device) -> None:
    """Raise unless a module can be compiled in this way on a device."""
    if not isinstance(compile, bool) and compile not in get_args(Mode):
        raise ProgramError(
            f"compile={compile!r}{did_you_mean(str(compile), get_args(Mode))}",
            hint='False, True, "blocks" or "cuda-graph"',
        )
    if compile == "cuda-graph" and device.type != "cuda":
        raise ProgramError(
            f'compile="cuda-graph" needs a GPU, and the module is on {device}',
            hint='compile="blocks", or device="cuda"',
        )


def compile_module(module: nn.Module, compile: Compile) -> Any:
    """Return the module as it runs: itself, or a compiled one."""
    if compile == "blocks" and compile_blocks([module]):
        return module
    if compile == "cuda-graph":
        return torch.compile(module, mode="reduce-overhead")
    return torch.compile(module) if compile else module


def compile_blocks(modules: Iterable[nn.Module]) -> int:
    """Compile the block classes of generated modules; return their number."""
    classes: dict[type[nn.Module], None] = {}
    for module in modules:
        generated = type(module)
        inside = {type(m): None for m in module.modules() if type(m) is not generated}
        classes |= {cls: None for cls in inside if cls.__module__ == generated.__module__}
    for cls in classes:
        if not hasattr(cls.forward, "_torchdynamo_orig_callable"):
            # Sizes are written into the code, so that no other ones can occur.
            cls.forward = torch.compile(cls.forward, dynamic=False)
    return len(classes)


def begin_graphs(store: ParameterStore) -> None:
    """Begin a step whose kernels are replayed into the memory of the step before."""
    for entry in store.entries:  # gradients that are still in use: the step adds to them
        for tensor in {id(t): t for t in (entry.leaf, entry.piece, entry.shown)}.values():
            if isinstance(tensor.grad, Tensor):
                tensor.grad = tensor.grad.clone()
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
