"""Compare Python values with themselves at an earlier time.

A snapshot describes a value so that equal snapshots mean an equal value. Taking one walks through
containers and objects, which costs too much at every step. `Guards` are cheap evidence instead: the
identities of attributes and variables, and of the items of lists, dicts and plain objects that
these refer to. While all of them are the same objects, the snapshots would be equal; anything else
proves nothing, and the snapshots decide.
"""

import array
import contextvars
import ctypes
import functools
import operator
import random
import types
import warnings
import weakref
from collections import UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import nn

# ---------------------------------------------------------------- snapshots of values
MAX_ITEMS = 256  # of a container that is compared element by element
MAX_PLAIN_ITEMS = 8192  # of a container of numbers and strings alone
MAX_ARRAY_BYTES = 2**20  # of an array that is compared by value
DEPTH = 6  # of nested containers and objects
ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, range)
_SCALARS = {bool, int, float, complex, str, bytes, type(None)}
# Names that every module has; forward may depend on `training` alone.
INTERNAL = (frozenset(vars(nn.Module())) | frozenset(vars(nn.Module))) - {"training"}
_MEMORY = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


class Missing:
    """The value of a variable that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class Same:
    """An object that is compared by identity, through a weak reference."""

    __slots__ = ("_get",)

    def __init__(self, value: Any) -> None:
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # builtin and small types have no weak references
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        value = self._get()
        return isinstance(other, Same) and value is not None and value is other._get()

    __hash__ = None  # type: ignore[assignment]


def snapshot(value: Any, names: Set[str], depth: int = DEPTH) -> Any:
    """Return a snapshot of a value, to compare with a later one.

    It keeps no large object alive: tensors and modules are compared by identity (tensors also by
    version). Numbers, strings, arrays and containers are compared by value, iterators by their
    position, other objects by their attributes in `names`, which some code mentions.
    """
    if isinstance(value, ATOMS):
        exact = isinstance(value, bool | float | complex)  # True == 1 == 1.0
        return (type(value), repr(value)) if exact else value
    if isinstance(value, torch.Tensor):
        versioned = not isinstance(value, nn.Parameter) and not value.is_inference()
        return (Same(value), value._version if versioned else 0)
    if isinstance(value, types.MethodType):
        owner = value.__self__  # attributes of modules are compared separately
        of_owner = Same(owner) if isinstance(owner, nn.Module) else snapshot(owner, names, depth)
        return (of_owner, Same(value.__func__))
    if isinstance(value, list | tuple | set | frozenset | dict) and depth:
        return _container(value, names, depth - 1)
    if isinstance(value, random.Random):
        return (Same(value), hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return (Same(value), repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return (Same(value), repr(value.get_state()))
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MAX_ARRAY_BYTES
        return (value.shape, value.dtype, value.tobytes()) if small else Same(value)
    if isinstance(value, bytearray | array.array):
        return (type(value), bytes(value)) if len(value) <= MAX_ARRAY_BYTES else Same(value)
    if isinstance(value, nn.Module):
        return (Same(value), [_module(module, names) for module in value.modules()])
    if not depth or isinstance(value, (type, types.ModuleType, *_FUNCTIONS)):
        return Same(value)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return (Same(value), [snapshot(part, names, depth) for part in parts])
    attributes = [(k, v) for k, v in attributes_of(value).items() if k in names]
    items = [(k, snapshot(v, names, depth - 1)) for k, v in attributes]
    return (Same(value), items, _contents(value, names, depth))


def _module(module: nn.Module, names: Set[str]) -> Any:
    """Return attributes and tensor versions of a module that does not belong to the model."""
    own = vars(module)
    public = {k: v for k, v in own.items() if k not in INTERNAL and k != "training"}
    tensors = [t for kind in ("_parameters", "_buffers") for t in own[kind].values()]
    versions = [t._version for t in tensors if t is not None and not t.is_inference()]
    return ([(k, snapshot(v, names, 1)) for k, v in public.items()], versions)


def _contents(value: Any, names: Set[str], depth: int) -> Any:
    """Return an object's state besides its attributes: items, referents, positions of iterators."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_lasti, _container(dict(frame.f_locals), names, depth - 1))
    if isinstance(value, contextvars.ContextVar | weakref.ref):
        content = value.get(MISSING) if isinstance(value, contextvars.ContextVar) else value()
        return snapshot(content, names, depth - 1)
    if isinstance(value, SynchronizedBase):  # a value in memory that processes share
        value = value.get_obj()
    if isinstance(value, _MEMORY):
        return bytes(value)
    with suppress(Exception):  # a class of the user's may raise anything: compare its attributes
        if isinstance(value, Mapping):
            return _container(dict(value), names, depth - 1)
        if isinstance(value, deque | UserList):
            return _container(list(value), names, depth - 1)
        if isinstance(value, Iterator):
            return _progress(value)
    return None


def _progress(value: Iterator[Any]) -> Any:
    if type(value).__module__ == "itertools":
        with warnings.catch_warnings():  # copies of these are deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            return repr(value.__reduce__())
    return operator.length_hint(value, -1)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in `__dict__` and in slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _container(value: Any, names: Set[str], depth: int) -> Any:
    kind = type(value)
    if len(value) > MAX_ITEMS:
        return (kind, len(value), _large(value))
    if isinstance(value, dict):
        return (kind, [[snapshot(item, names, depth) for item in pair] for pair in value.items()])
    if isinstance(value, set | frozenset):
        return (kind, sorted(map(repr, value)))
    return (kind, [snapshot(item, names, depth) for item in value])


def _large(value: Any) -> Any:
    if len(value) <= MAX_PLAIN_ITEMS:
        items = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
        if set(map(type, items)) <= _SCALARS:
            return items
    return Same(value)


def cell_value(cell: types.CellType) -> Any:
    """Return the value of a closure's variable, or `MISSING` before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def class_member(cls: type, name: str) -> Any:
    """Return the member of a class or its bases as it is stored, without calling descriptors."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)


# ---------------------------------------------------------------- guards
_CONSTANTS = (*ATOMS, *_FUNCTIONS, type, types.ModuleType, Missing)
_OTHER_STATE = (  # objects whose state is more than their attributes
    *(torch.Tensor, nn.Module, np.ndarray, random.Random, np.random.Generator),
    *(np.random.RandomState, Mapping, deque, UserList, Iterator, types.MethodType),
    *(functools.partial, contextvars.ContextVar, weakref.ref, SynchronizedBase, *_MEMORY),
)
_NO_ATTRIBUTES = {object(): None}  # stands for the attributes of an object that no longer exists


class ItemGuard:
    """The items of one container or object, by identity.

    Constants among them are kept alive, so that no new object can reuse their ids. Other objects
    are not: they have guards of their own, which fail once the object no longer exists.
    """

    __slots__ = ("_alive", "_ids", "_items")

    def __init__(self, items: Callable[[], Iterable[Any]], alive: Any = None) -> None:
        self._items, self._alive = items, alive
        self._ids = [id(item) for item in items()]

    def holds(self) -> bool:
        """Return whether the items are still the same."""
        return [*map(id, self._items())] == self._ids


def is_constant(value: Any) -> bool:
    """Return whether the same object always means the same value."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return isinstance(value, _CONSTANTS)


def item_guards(value: Any, names: Set[str], depth: int = DEPTH) -> list[ItemGuard] | None:
    """Return guards for everything inside `value` that its snapshot covers.

    Return None if identities are not enough: tensors and arrays change in place, and iterators
    advance.
    """
    if is_constant(value):
        return []
    if not depth:
        return None
    if type(value) in (list, tuple, dict):
        return _container_guards(value, names, depth)
    if isinstance(value, _OTHER_STATE) or any(vars(c).get("__slots__") for c in type(value).mro()):
        return None
    return _object_guards(value, names, depth)


def _container_guards(value: Any, names: Set[str], depth: int) -> list[ItemGuard] | None:
    """Guard a list, tuple or dict of constants; one of objects would keep them alive."""
    if len(value) > MAX_ITEMS:
        return None
    items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    guards = [ItemGuard(value.__iter__, items)]
    if isinstance(value, dict):
        guards.append(ItemGuard(value.values))
    for item in items:
        if not is_constant(item) and type(item) not in (list, tuple, dict):
            return None
        inner = item_guards(item, names, depth - 1)
        if inner is None:
            return None
        guards += inner
    return guards


def _object_guards(value: Any, names: Set[str], depth: int) -> list[ItemGuard] | None:
    """Guard the set of an object's attributes, and the values of those in `names`."""
    try:
        ref = weakref.ref(value)
        own = value.__dict__
    except (TypeError, AttributeError):
        return None
    read = [name for name in own if name in names]

    def attributes() -> Mapping[Any, Any]:
        alive = ref()
        return _NO_ATTRIBUTES if alive is None else alive.__dict__

    def values() -> Iterable[Any]:
        return map(attributes().get, read)

    constants = [own[name] for name in read if is_constant(own[name])]
    guards = [ItemGuard(attributes, list(own)), ItemGuard(values, constants)]
    for name in read:
        inner = item_guards(own[name], names, depth - 1)
        if inner is None:
            return None
        guards += inner
        if type(own[name]) in (list, tuple, dict):
            constants.append(own[name])
    return guards


class Guards:
    """The identities of everything that a model's captures read.

    The loops of `hold` run before every training step: they compare many values per call into C.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._memo: dict[int, list[ItemGuard] | None] = {}
        self._modules: list[Callable[[], Any]] = []
        self._children: dict[int, list[int]] = {}  # index of a module -> its children's ids
        self._absent: defaultdict[str, list[int]] = defaultdict(list)  # name -> modules without it
        self._present: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        self._class_members: dict[tuple[type, str], Any] = {}
        self._namespaces: dict[int, tuple[Mapping[str, Any], list[tuple[str, Any]]]] = {}
        self._reads: list[tuple[Callable[[], Any], int]] = []  # with the id of the value
        self._constants: list[Any] = []  # values of `_reads`, alive so that no id is reused
        self._items: list[ItemGuard] = []
        self._snapshots: list[tuple[Callable[[], Any], Any]] = []
        self._without_hooks: list[Any] = []  # where hooks would be registered
        self._hooks: list[tuple[Any, list[int]]] = []
        self._default_dtype = torch.get_default_dtype()

    def add_module(
        self, module: nn.Module, attributes: Sequence[str], methods: Sequence[str]
    ) -> list[str]:
        """Guard a module's children and attributes; return attributes that need `add_value`."""
        own, cls, index = vars(module), type(module), len(self._modules)
        self._modules.append(weakref.ref(module))
        if own["_modules"]:
            self._children[index] = [*map(id, own["_modules"].values())]
        unguarded = []
        for name in (*attributes, *methods):
            is_method = name in methods
            if name in own and (is_method or is_constant(own[name])):
                self._present[name].append((index, own[name]))
            elif name not in own and (is_method or is_constant(class_member(cls, name))):
                self._absent[name].append(index)
            else:
                unguarded.append(name)
                continue
            self._class_members[cls, name] = getattr(cls, name, MISSING)
        return unguarded

    def add_member(self, namespace: Mapping[str, Any], name: str, value: Any) -> None:
        """Guard a constant in a namespace."""
        self._namespaces.setdefault(id(namespace), (namespace, []))[1].append((name, value))

    def add_constant(self, read: Callable[[], Any], value: Any) -> None:
        """Guard a constant that is not in a namespace."""
        self._reads.append((read, id(value)))
        self._constants.append(value)

    def add_value(self, read: Callable[[], Any], before: Any) -> None:
        """Guard any other value, whose snapshot is `before`."""
        value = read()
        if id(value) not in self._memo:
            self._memo[id(value)] = guards = item_guards(value, self._names)
            self._items += guards or ()
        if self._memo[id(value)] is None or is_constant(value):
            self._snapshots.append((read, before))
        else:
            self._reads.append((read, id(value)))

    def add_hooks(self, registered: Any) -> None:
        """Guard one dict of registered hooks."""
        if registered:
            self._hooks.append((registered, list(registered)))
        else:
            self._without_hooks.append(registered)

    def hold(self) -> bool:
        """Return whether nothing has changed; False if in doubt."""
        if any(self._without_hooks) or not self._modules_hold():
            return False
        for (cls, name), value in self._class_members.items():
            if getattr(cls, name, MISSING) is not value:
                return False
        for namespace, members in self._namespaces.values():
            for name, value in members:
                if namespace.get(name, MISSING) is not value:
                    return False
        for read, identity in self._reads:
            if id(read()) != identity:
                return False
        for guard in self._items:
            if not guard.holds():
                return False
        for registered, keys in self._hooks:
            if [*registered] != keys:
                return False
        return torch.get_default_dtype() is self._default_dtype and self._snapshots_hold()

    def _modules_hold(self) -> bool:
        """Compare one name at a time over all modules: most modules share a few names."""
        try:
            own = [ref().__dict__ for ref in self._modules]
        except AttributeError:  # a module no longer exists
            return False
        for name, indices in self._absent.items():
            if [1 for index in indices if name in own[index]]:
                return False
        for name, values in self._present.items():
            if [1 for index, value in values if own[index].get(name, MISSING) is not value]:
                return False
        for index, children in self._children.items():
            if [*map(id, own[index]["_modules"].values())] != children:
                return False
        return True

    def _snapshots_hold(self) -> bool:
        present: dict[int, Any] = {}
        for read, before in self._snapshots:
            value = read()
            if id(value) not in present:
                present[id(value)] = snapshot(value, self._names)
            if present[id(value)] != before:
                return False
        return True
