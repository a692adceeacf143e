"""The tensors of another framework's model (Keras, ONNX, JAX) in a tree of modules.

An underscore is appended to names that are taken, be it by a method of the module.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def add_folder(root: nn.Module, path: Sequence[str], kind: type[nn.Module] = nn.Module) -> str:
    """Return the name of the module at a path; modules that do not exist are made."""
    module, names = root, []
    for name in path:
        while name not in module._modules and hasattr(module, name):
            name += "_"
        if name not in module._modules:
            module.add_module(name, kind())
        module = module.get_submodule(name)
        names.append(name)
    return ".".join(names)


def add_tensor(root: nn.Module, path: Sequence[str], tensor: Tensor, *, is_parameter: bool) -> str:
    """Register a tensor under a path and return its name."""
    folder, name = add_folder(root, path[:-1]), path[-1]
    owner = root.get_submodule(folder)
    while hasattr(owner, name):
        name += "_"
    if is_parameter:
        owner.register_parameter(
            name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        )
    else:
        owner.register_buffer(name, tensor)
    return f"{folder}.{name}" if folder else name


def tensor_named(root: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer."""
    tensor: Tensor = attrgetter(name)(root)
    return tensor


def tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a copy of an array as a tensor."""
    if array.dtype.name == "bfloat16":  # of ml_dtypes: torch cannot read it directly
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))
