"""Cheap evidence that Python state is as it was when it was last compared.

`Guards` take apart the values that a snapshot saw into identities: of attributes and variables, and
of the items of lists, dicts and plain objects that these refer to. While all of them are the same
objects, the snapshot would be the same; anything else proves nothing, and the snapshot decides.
"""

from __future__ import annotations

import random
import types
import weakref
from collections import UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.frontend.python_state import ATOMS, DEPTH, MAX_ITEMS, MISSING, snapshot

__all__ = ["Guards", "ItemGuard", "class_member", "is_constant", "item_guards"]

_CONSTANTS = (*ATOMS, types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
_OTHER_STATE = (  # objects that hold more than their attributes
    *(torch.Tensor, nn.Module, np.ndarray, random.Random, np.random.Generator),
    *(np.random.RandomState, Mapping, deque, UserList, Iterator, types.MethodType),
)
_NOTHING = {object(): None}  # in the place of the attributes of an object that is gone


class ItemGuard:
    """The items of one container or object, by identity.

    Constants are held strongly, so that no other object can get their place in memory. Objects are
    not: they have guards of their own, which fail once an object is gone.
    """

    __slots__ = ("_held", "_ids", "_items")

    def __init__(self, items: Callable[[], Iterable[Any]], held: Any = None) -> None:
        self._items, self._held = items, held
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
    """Return guards for everything inside `value` that its snapshot shows, or None.

    None means that identities do not tell: tensors and arrays change in place, iterators advance.
    """
    if is_constant(value):
        return []
    if not depth:
        return None
    if type(value) in (list, tuple, dict):
        return _of_container(value, names, depth)
    if isinstance(value, _OTHER_STATE) or any(vars(c).get("__slots__") for c in type(value).mro()):
        return None
    return _of_object(value, names, depth)


def _of_container(value: Any, names: Set[str], depth: int) -> list[ItemGuard] | None:
    """Guards of a list, tuple or dict of constants: it would keep objects in it alive."""
    items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    if len(value) > MAX_ITEMS:
        return None
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


def _of_object(value: Any, names: Set[str], depth: int) -> list[ItemGuard] | None:
    """Guards of the attributes that some code names, and of which attributes there are."""
    try:
        held = weakref.ref(value)
        own = value.__dict__
    except (TypeError, AttributeError):
        return None
    read = [name for name in own if name in names]

    def attributes() -> Mapping[Any, Any]:
        alive = held()
        return _NOTHING if alive is None else alive.__dict__

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


def class_member(cls: type, name: str) -> Any:
    """Return what a class or one of its bases has under a name, without descriptors."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)


class Guards:
    """Identities of everything that a model's captures read."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._memo: dict[int, list[ItemGuard] | None] = {}
        self._modules: list[Callable[[], Any]] = []
        self._children: dict[int, list[int]] = {}  # place of a module -> its children's ids
        self._absent: defaultdict[str, list[int]] = defaultdict(list)  # name -> modules without it
        self._present: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        self._of_classes: dict[tuple[type, str], Any] = {}
        self._homes: dict[int, tuple[Mapping[str, Any], list[tuple[str, Any]]]] = {}
        self._reads: list[tuple[Callable[[], Any], Any]] = []  # of constants
        self._objects: list[tuple[Callable[[], Any], int]] = []  # of what has item guards
        self._items: list[ItemGuard] = []
        self._snapshots: list[tuple[Callable[[], Any], Any]] = []
        self._empty: list[Any] = []  # hooks would be added here
        self._hooks: list[tuple[Any, list[int]]] = []
        self._default_dtype = torch.get_default_dtype()

    def add_module(
        self, module: nn.Module, attributes: Sequence[str], methods: Sequence[str]
    ) -> list[str]:
        """Guard a module's children and attributes; return those that need `add_value`."""
        own, cls, place = vars(module), type(module), len(self._modules)
        self._modules.append(weakref.ref(module))
        if own["_modules"]:
            self._children[place] = [*map(id, own["_modules"].values())]
        others = []
        for name in (*attributes, *methods):
            is_method = name in methods
            if name in own and (is_method or is_constant(own[name])):
                self._present[name].append((place, own[name]))
            elif name not in own and (is_method or is_constant(class_member(cls, name))):
                self._absent[name].append(place)
            else:
                others.append(name)
                continue
            self._of_classes[cls, name] = getattr(cls, name, MISSING)
        return others

    def add_member(self, home: Mapping[str, Any], name: str, value: Any) -> None:
        """Guard a constant in a namespace."""
        self._homes.setdefault(id(home), (home, []))[1].append((name, value))

    def add_constant(self, read: Callable[[], Any], value: Any) -> None:
        """Guard a constant that takes more than a look into a namespace."""
        self._reads.append((read, value))

    def add_value(self, read: Callable[[], Any], taken: Any) -> None:
        """Guard any other value; `taken` is its snapshot."""
        value = read()
        if id(value) not in self._memo:
            self._memo[id(value)] = guards = item_guards(value, self._names)
            self._items += guards or ()
        if self._memo[id(value)] is None or is_constant(value):
            self._snapshots.append((read, taken))
        else:
            self._objects.append((read, id(value)))

    def add_hooks(self, registered: Any) -> None:
        """Guard the hooks in one place."""
        if registered:
            self._hooks.append((registered, list(registered)))
        else:
            self._empty.append(registered)

    def hold(self) -> bool:
        """Return whether everything is as it was; False if in doubt."""
        if any(self._empty):
            return False
        if not self._modules_hold():
            return False
        for (cls, name), value in self._of_classes.items():
            if getattr(cls, name, MISSING) is not value:
                return False
        for home, members in self._homes.values():
            for name, value in members:
                if home.get(name, MISSING) is not value:
                    return False
        for read, value in self._reads:
            if read() is not value:
                return False
        for read, identity in self._objects:
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
        """Compare names one by one over all modules: most modules share a few of them."""
        try:
            own = [ref().__dict__ for ref in self._modules]
        except AttributeError:  # a module is gone
            return False
        for name, places in self._absent.items():
            if [1 for place in places if name in own[place]]:
                return False
        for name, values in self._present.items():
            if [1 for place, value in values if own[place].get(name, MISSING) is not value]:
                return False
        for place, children in self._children.items():
            if [*map(id, own[place]["_modules"].values())] != children:
                return False
        return True

    def _snapshots_hold(self) -> bool:
        taken_now: dict[int, Any] = {}
        for read, taken in self._snapshots:
            value = read()
            if id(value) not in taken_now:
                taken_now[id(value)] = snapshot(value, self._names)
            if taken_now[id(value)] != taken:
                return False
        return True
