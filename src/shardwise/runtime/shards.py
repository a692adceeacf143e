"""Parameters and gradients of which this rank holds a shard, as tensors of the full shape.

`pm.parameters()` yields the full tensor if every rank has it, else a `ShardParameter`, whose
`shape`, `dim()` and `dtype` are those of the parameter on one device. Elementwise arithmetic works
on every rank's shard, also with full tensors and other shards, and means the same as on one device.
Everything else (norms, sums, indexing, random numbers) would be wrong on a shard, and raises an
error with an alternative.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import OptimizerError, ProgramError
from shardwise.runtime.parameters import Entry

if TYPE_CHECKING:
    from shardwise.runtime.store import ParameterStore

_ATEN = torch.ops.aten
# Elementwise operators that torch does not tag as such.
_ELEMENTWISE = {
    _ATEN.copy_.default, _ATEN.zero_.default, _ATEN.fill_.Scalar, _ATEN.fill_.Tensor,
    _ATEN._to_copy.default, _ATEN.zeros_like.default, _ATEN.ones_like.default,
    _ATEN.empty_like.default, _ATEN.full_like.default, _ATEN.masked_fill.Scalar,
    _ATEN.masked_fill_.Scalar, _ATEN.masked_fill.Tensor, _ATEN.masked_fill_.Tensor,
}  # fmt: skip
_SAME_MEMORY = {_ATEN.detach.default, _ATEN.alias.default}
_NOT_ELEMENTWISE = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}
_HINTS = {
    "norm": "sw.clip_grad_norm_(pm, max_norm), which counts every rank's part once",
    "random": "noise = torch.randn(p.shape), equal on all ranks by the seed; then p.add_(noise)",
    "other": "x.full_tensor() for the full tensor on every rank, pm.gather_gradients(), or make it "
    "a part of the step's loss",
}


class ShardLayout:
    """The part of one parameter's full tensor that a rank's tensor is.

    It is the local tensor of the parameter's splits (`piece=False`), or the flat range of that
    tensor that this rank owns.
    """

    def __init__(self, store: ParameterStore, entry: Entry, *, piece: bool) -> None:
        self._store = weakref.ref(store)
        self.entry, self.piece = entry, piece and entry.group is not None

    @property
    def store(self) -> ParameterStore:
        store = self._store()
        if store is None:
            raise OptimizerError("the parallel module of this parameter no longer exists")
        return store

    def equals(self, other: ShardLayout) -> bool:
        """Return whether shards of both have the same elements, on this rank and all others."""
        own, remote = self.entry.spec, other.entry.spec
        if self.piece or other.piece:
            return self.entry is other.entry and self.piece == other.piece
        return (own.shape, own.splits) == (remote.shape, remote.splits)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the model has the full tensor."""
        return not self.piece and self.store.is_replicated(self.entry)

    def take(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, or of one that broadcasts to it."""
        shape = self.entry.spec.shape
        try:
            full = full.expand(shape)
        except RuntimeError:
            raise OptimizerError(
                f"a tensor of shape {tuple(full.shape)} does not broadcast to a parameter of "
                f"shape {shape}",
                where=self.entry.spec.name,
            ) from None
        store = self.store
        return (store.piece_of if self.piece else store.local_of)(self.entry, full)

    def gather(self, part: Tensor) -> Tensor:
        """Return the full tensor; all ranks that hold shards call it."""
        return self.store.gather_full(self.entry, part, piece=self.piece)


class ShardTensor(Tensor):
    """A tensor of the full shape of which this rank holds the part `to_local()`."""

    place: ShardLayout
    local: Tensor
    changed: Callable[[], None] | None

    @staticmethod
    def __new__(
        cls: type[ShardTensor],
        layout: ShardLayout,
        local: Tensor,
        changed: Callable[[], None] | None = None,
    ) -> ShardTensor:
        tensor: ShardTensor = Tensor._make_wrapper_subclass(
            cls, layout.entry.spec.shape, dtype=local.dtype, device=local.device
        )
        tensor.place, tensor.local, tensor.changed = layout, local, changed
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def to_local(self) -> Tensor:
        """Return this rank's part as a plain tensor, in the same memory."""
        return self.local

    def full_tensor(self) -> Tensor:
        """Return a copy of the full tensor; all ranks call it."""
        return self.place.gather(self.local)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        name, shape = self.place.entry.spec.name, tuple(self.shape)
        local_shape = tuple(self.local.shape)
        return f"{type(self).__name__}({name!r}, shape={shape}, on this rank {local_shape})"

    def __deepcopy__(self, memo: Any) -> ShardTensor:
        return ShardTensor(self.place, self.local.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling", self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run elementwise operators on shards, and refuse all others."""
        kwargs = kwargs or {}
        if func in _SAME_MEMORY:
            source = args[0]
            return ShardTensor(source.place, source.local.detach(), source.changed)
        shards = [s for s in tree_leaves((args, kwargs)) if isinstance(s, ShardTensor)]
        if not _is_elementwise(func):
            if not func._schema.is_mutable and all(shard.place.is_replicated for shard in shards):
                plain = tree_map_only(ShardTensor, ShardTensor.to_local, (args, kwargs))
                return func(*plain[0], **plain[1])
            _refuse(func.__name__.partition(".")[0], shards[0])
        if func.__name__.startswith("_foreach_"):
            return _run_foreach(func, args, kwargs)
        return _compute(func, shards, args, kwargs)


def _is_elementwise(func: Any) -> bool:
    name = func.__name__.partition(".")[0]
    if name.startswith("_foreach_"):
        return name not in _NOT_ELEMENTWISE
    return func in _ELEMENTWISE or torch.Tag.pointwise in func.tags


def _refuse(name: str, tensor: ShardTensor) -> NoReturn:
    kind = "norm" if "norm" in name else "random" if "rand" in name or name in _RANDOM else "other"
    raise OptimizerError(
        f"{name} of a tensor of shape {tuple(tensor.shape)}, which is sharded over ranks, would "
        f"only see this rank's part ({tensor.local.numel()} of {tensor.numel()} elements)",
        where=tensor.place.entry.spec.name,
        hint=_HINTS[kind],
    )


_RANDOM = {"normal_", "uniform_", "bernoulli", "bernoulli_", "exponential_", "native_dropout"}


def _compute(func: Any, shards: Sequence[ShardTensor], args: Any, kwargs: Any) -> Any:
    """Run an elementwise call in the layout of the tensor it writes, else of its first shard."""
    _refuse_other_stages(shards[0], args)
    writes = func._schema.is_mutable
    target = (args[0] if isinstance(args[0], ShardTensor) else None) if writes else shards[0]
    layout = None if target is None else target.place
    convert = _converter(layout, None if target is None else target.local.device)
    result = func(
        *(convert(a) for a in args),
        **{name: convert(value) for name, value in kwargs.items() if name != "memory_format"},
    )
    if writes:
        if target is not None and target.changed is not None:
            target.changed()
        return args[0]
    return ShardTensor(target.place, result) if target is not None else result


def _refuse_other_stages(shard: ShardTensor, args: Sequence[Any]) -> None:
    """Raise if an operand is a stand-in for a parameter of another pipeline stage."""
    if not any(isinstance(value, Tensor) and value.is_meta for value in args):
        return
    names = {id(p): name for name, p in shard.place.store.stand_ins.items()}
    other = next((names[id(value)] for value in args if id(value) in names), "a parameter")
    name = shard.place.entry.spec.name
    raise OptimizerError(
        f"arithmetic of {name} with {other}, which is on another pipeline stage",
        where=name,
        hint="a plan whose stages begin so that one has both, or a plan without stages; for an "
        "average of weights, clones of pm.named_parameters() are on the parameters' own stages",
    )


def _converter(layout: ShardLayout | None, device: torch.device | None) -> Callable[[Any], Any]:
    """Return a function that converts arguments to plain tensors, in a layout or in full."""

    def convert(value: Any) -> Any:
        if isinstance(value, ShardTensor):
            if layout is None:
                return value.full_tensor()
            if value.place.equals(layout):
                return value.local
            return layout.take(value.full_tensor()).to(device)
        if isinstance(value, Tensor) and value.dim() and layout is not None:
            return layout.take(value).to(device)
        return value

    return convert


def _run_foreach(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call on lists of tensors, one after the other."""
    mutable = func._schema.is_mutable
    namespace = _ATEN if mutable else torch
    single = getattr(namespace, func._schema.name.removeprefix("aten::_foreach_"))
    results = []
    for index in range(len(args[0])):
        items = [a[index] if isinstance(a, list | tuple) else a for a in args]
        results.append(single(*items, **kwargs))
    return None if mutable else results


class ShardParameter(ShardTensor):
    """A parameter of a parallel module of which this rank holds a part.

    The next step uses changed values. `grad` is the synchronized gradient, sharded as well; None,
    a sharded or a full tensor may be assigned.
    """

    _is_param = True  # isinstance(p, nn.Parameter)

    @staticmethod
    def of(store: ParameterStore, entry: Entry) -> ShardParameter:
        """Return the parameter of one entry."""
        value, piece = store.stored(entry)
        layout = ShardLayout(store, entry, piece=piece)
        weak = weakref.ref(store)

        def changed() -> None:
            owner = weak()
            if owner is not None:
                owner.value_changed(entry)

        parameter = ShardTensor.__new__(ShardParameter, layout, value, changed)
        assert isinstance(parameter, ShardParameter)
        return parameter

    @property
    def grad(self) -> Tensor | None:
        """The gradient, as a tensor of the full shape."""
        store, entry = self.place.store, self.place.entry
        grad = store.gradient(entry)
        if grad is None:
            return None
        return ShardTensor(ShardLayout(store, entry, piece=entry.zero >= 2), grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        store, entry = self.place.store, self.place.entry
        if value is None:
            store.set_gradient(entry, None)
            return
        layout = ShardLayout(store, entry, piece=entry.zero >= 2)
        if tuple(value.shape) != tuple(self.shape):
            raise OptimizerError(
                f"a gradient of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(self.shape)}",
                where=entry.spec.name,
            )
        device = (entry.piece if entry.zero >= 2 else entry.leaf).device
        part = _converter(layout, device)(value) if value.dim() else value
        store.set_gradient(entry, part.detach().to(entry.master).clone())

    @grad.deleter
    def grad(self) -> None:
        self.place.store.set_gradient(self.place.entry, None)

    @property
    def data(self) -> Tensor:
        """The values without autograd history; changing them changes the parameter."""
        return ShardTensor(self.place, self.local, self.changed)

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        return self.place.entry.shown.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.place.entry.shown.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardParameter:
        """Freeze or unfreeze the parameter."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise: gradients do not pass through a sharded parameter."""
        raise hook_error(self.place.entry.spec.name)

    register_post_accumulate_grad_hook = register_hook


def hook_error(name: str) -> ProgramError:
    """Return the error of a gradient hook that would see shards and partial sums."""
    return ProgramError(
        "a gradient hook was registered on this rank's part of a parameter",
        where=name,
        hint="register it on the parameter of the model that was given to parallelize; the next "
        "step applies it to the full gradient",
    )
