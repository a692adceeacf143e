"""A registered accelerator for tests: `register()` adds the device `dummy` to this process.

Its tensors are of torch's `PrivateUse1` kind with an allocator of their own. Kernels copy to the
CPU and back. gloo refuses its memory, as it refuses that of other accelerators.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path

import torch

NAME = "dummy"
SYNCHRONIZED: list[object] = []  # calls of `torch.dummy.synchronize`


def build(folder: Path) -> Path:
    """Compile the device; this takes a minute."""
    from torch.utils import cpp_extension

    source = Path(__file__).with_name("device.cpp")
    cpp_extension.load("dummy_device", [str(source)], build_directory=str(folder),
                       extra_cflags=["-O0"], is_python_module=False)  # fmt: skip
    return folder / "dummy_device.so"


@functools.cache
def register(library: Path) -> torch.device:
    """Load a compiled device into this process."""
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": SYNCHRONIZED.append,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.load_library(str(library))
    torch.__future__.set_swap_module_params_on_conversion(True)  # else `to` unties parameters
    return torch.device(NAME, 0)
