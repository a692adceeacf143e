"""JAX loss functions as trainable modules.

`from_jax` traces a loss function to a jaxpr, once for each set of batch shapes. The forward pass of
the module runs the equations of the jaxpr with torch functions, so `sw.capture` records them, and
autograd computes the gradients. Values that depend on neither parameters nor batch, such as random
numbers from a fixed key, are computed by JAX while the model is captured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.errors import CaptureError, ConfigError
from shardwise.integrations.jax import control, indexing  # noqa: F401 - register primitives
from shardwise.integrations.jax.primitives import Interpreter, array_type
from shardwise.tensor_tree import add_tensor, tensor_named, tensor_of

try:
    import jax
    import jax.numpy as jnp
    from jax import tree_util
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ConfigError(
        "sw.from_jax needs the package jax", hint="pip install 'shardwise[jax]'"
    ) from error


def from_jax(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> JaxModule:
    """Return a module that computes `loss_fn(params, batch)`, and whose weights are `params`.

    `params` is any pytree: a dict of Flax, a module of Equinox. Its floating-point arrays are
    parameters, under their paths in the pytree; other arrays are buffers; everything else is part
    of the function. A dict as `batch` gives the keyword arguments of the module, a tuple its
    positional ones. `module.pytree()` returns the current weights in the form of `params`.

    >>> module = sw.from_jax(loss_fn, params, batch)  # doctest: +SKIP
    >>> graph = sw.capture(module, batch_of_torch_tensors)  # doctest: +SKIP
    """
    return JaxModule(loss_fn, params, batch)


class _LossFunction:
    """A function of JAX with the parts of its parameters that are not arrays.

    Captured modules are watched for changes of Python state. What is inside of this object is not:
    as with `jax.jit`, the function is traced once for each set of shapes.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], structure: Any, leaves: Any) -> None:
        self.loss_fn, self.structure = loss_fn, structure
        self.static = [None if _is_array(leaf) else leaf for leaf in leaves]
        self.numbers = [n for n, leaf in enumerate(leaves) if _is_array(leaf)]
        self.name = getattr(loss_fn, "__qualname__", repr(loss_fn))
        self.jaxprs: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _LossFunction:
        return self  # it never changes

    def pytree(self, arrays: Sequence[Any]) -> Any:
        """Return the parameters with these arrays."""
        leaves = list(self.static)
        for number, array in zip(self.numbers, arrays, strict=True):
            leaves[number] = array
        return tree_util.tree_unflatten(self.structure, leaves)

    def trace(self, weights: Sequence[Any], leaves: Sequence[Any], structure: Any) -> Any:
        """Return the jaxpr for a batch with these leaves: types of arrays, and other values."""
        types = ((leaf.shape, leaf.dtype) if _is_type(leaf) else leaf for leaf in leaves)
        key = (structure, *types)
        if key not in self.jaxprs:
            self.jaxprs[key] = self._trace(weights, leaves, structure)
        return self.jaxprs[key]

    def _trace(self, weights: Sequence[Any], leaves: Sequence[Any], structure: Any) -> Any:
        def loss(values: Sequence[Any], arrays: Sequence[Any]) -> Any:
            given = iter(arrays)
            batch = [next(given) if _is_type(leaf) else leaf for leaf in leaves]
            return self.loss_fn(self.pytree(values), tree_util.tree_unflatten(structure, batch))

        try:
            closed = jax.make_jaxpr(loss)(weights, [leaf for leaf in leaves if _is_type(leaf)])
        except Exception as error:  # of the user's function, or of JAX while it traces it
            reason = str(error).splitlines()[0] if str(error) else ""
            raise CaptureError(
                f"JAX cannot trace {self.name}: {type(error).__name__}: {reason}",
                hint="jax.make_jaxpr(loss_fn)(params, batch) must work",
            ) from error
        shapes = [
            (aval.shape, jnp.issubdtype(aval.dtype, jnp.floating)) for aval in closed.out_avals
        ]
        if shapes != [((), True)]:
            results = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in closed.out_avals)
            raise CaptureError(
                f"{self.name} returns {results}, not one floating-point scalar",
                hint="return the loss alone",
            )
        return closed


class JaxModule(nn.Module):
    """A loss function of JAX as a module; see `from_jax`."""

    is_graph_storable = False  # on disk: its digest would not cover the function

    def __init__(self, loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> None:
        super().__init__()
        leaves, structure = tree_util.tree_flatten_with_path(params)
        self._function = _LossFunction(loss_fn, structure, [leaf for _, leaf in leaves])
        self._paths: list[str] = []  # names of the arrays of `params`, in their order
        self._dtypes: list[Any] = []
        for path, leaf in leaves:
            if _is_array(leaf):
                # `['dense']['kernel']` becomes `dense.kernel`
                words = re.findall(r"[^\[\]'\".]+", tree_util.keystr(path)) or ["weight"]
                names, tensor = [re.sub(r"\W", "_", w) for w in words], tensor_of(np.asarray(leaf))
                trains = tensor.is_floating_point() or tensor.is_complex()
                self._paths.append(add_tensor(self, names, tensor, is_parameter=trains))
                self._dtypes.append(jax.dtypes.canonicalize_dtype(leaf.dtype))
        self._widest = next((d for d in self._dtypes if jnp.issubdtype(d, jnp.floating)), None)
        if self._widest is None:
            raise ConfigError(
                "params has no floating-point arrays to train",
                hint="from_jax(loss_fn, params, batch), where loss_fn(params, batch) is the loss",
            )
        self._kind = type(batch).__name__
        types, shape = tree_util.tree_flatten(tree_util.tree_map(_as_type, batch))
        self._function.trace(self._weight_types(), types, shape)  # errors show up here, not later

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch of torch tensors."""
        batch: Any = kwargs
        if not kwargs:
            batch = args[0] if len(args) == 1 and self._kind not in ("tuple", "list") else args
            batch = list(batch) if self._kind == "list" else batch
        leaves, structure = tree_util.tree_flatten(batch)
        types = [_as_type(leaf) for leaf in leaves]
        closed = self._function.trace(self._weight_types(), types, structure)
        arrays = [  # 32-bit unsigned integers, such as random keys, have 64 bits in torch
            leaf.long() if leaf.dtype == torch.uint32 else leaf
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]
        first = next(p for p in self.parameters() if p.is_floating_point())
        original = getattr(torch, jnp.dtype(self._widest).name)
        widened = {original: first.dtype} if first.dtype != original else {}
        interpreter = Interpreter(device=first.device, widened=widened)
        weights = [tensor_named(self, path) for path in self._paths]
        (loss,) = interpreter.run(closed.jaxpr, closed.consts, [*weights, *arrays])
        return interpreter.tensor(loss)

    def pytree(self) -> Any:
        """Return the current weights as JAX arrays, in the form of the original `params`."""
        arrays = []
        for path, dtype in zip(self._paths, self._dtypes, strict=True):
            tensor = tensor_named(self, path).detach().cpu()
            array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
            arrays.append(jnp.asarray(array, dtype=dtype))
        return self._function.pytree(arrays)

    def extra_repr(self) -> str:
        return self._function.name

    def _weight_types(self) -> list[Any]:
        pairs = zip(self._paths, self._dtypes, strict=True)
        return [array_type(tensor_named(self, path).shape, dtype) for path, dtype in pairs]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _as_type(leaf: Any) -> Any:
    """Return shape and dtype of an array; other values stay as they are."""
    if isinstance(leaf, Tensor):
        dtype = jnp.dtype(str(leaf.dtype).removeprefix("torch."))
        return array_type([int(n) for n in leaf.shape], jax.dtypes.canonicalize_dtype(dtype))
    if _is_array(leaf):
        return array_type(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return leaf
