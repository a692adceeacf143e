"""The Python state that captured programs depend on, compared at every step.

Enters: the user's model, and what its captures read (`Reads`). Leaves: the number of the present
state: each distinct one has its own number, and thereby its own programs. The model is held by
weak references only; where it is gone, nobody can change it.
"""

from __future__ import annotations

import functools
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardwise.errors import ProgramError
from shardwise.frontend import skeleton
from shardwise.frontend.hooks import hooks_of
from shardwise.frontend.reach import Variable
from shardwise.frontend.snapshot import ATOMS, INTERNAL, MISSING, snapshot
from shardwise.frontend.watch import Reads

STATES = 64  # whose numbers are remembered
MANY = (8, 64, 512)  # numbers of states at which to warn
_CURE = "pass a value that changes often in the batch, as a tensor"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = vars(nn.modules.module)  # where hooks of all modules are
_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in _HOOKS)
_BY_IDENTITY = (*ATOMS, types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)

_GONE = object()  # of a module that nobody holds any more

Snapshots = dict[str, Any]


def attributes_of(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's own attributes that are plain values."""
    names = {n for cls in type(model).__mro__ for n, v in vars(cls).items() if _is_value(v)}
    return frozenset((names | set(vars(model))) - INTERNAL - {"training"})


def _is_value(member: Any) -> bool:
    return not hasattr(type(member), "__get__")


class PythonState:
    """Compares a model's Python state with that of its captures."""

    def __init__(self, model: nn.Module) -> None:
        self.reads = Reads()
        self._root_is_made = isinstance(model, nn.ModuleDict)  # of a mapping: nobody holds it
        self._modules = {path: weakref.ref(m) for path, m in model.named_modules()}
        self._parts = [_Part(path, module) for path, module in model.named_modules()]
        self._parameters = [(n, weakref.ref(p)) for n, p in model.named_parameters()]
        self._number, self._numbers = 0, itertools.count(1)
        self._current: Snapshots = {}
        self._hooks: list[int] = []
        self._known: list[tuple[Snapshots, int]] = []
        self._variables: list[tuple[Variable, Any]] = []  # those that are compared by identity
        self._others: list[tuple[Callable[[], Any], Any]] = []  # those that need a snapshot

    def add(self, reads: Reads) -> None:
        """Compare from now on what captures have read by now."""
        self.reads = reads
        present = self._take()
        for known, _ in self._known:  # programs do not depend on what they did not read
            for key, value in present.items():
                known.setdefault(key, value)
        if not self._known:
            self._known.append((present, self._number))
        self._set(present)

    def number(self) -> int:
        """Return the number of the present state; raise if parts of the model were replaced."""
        if self._is_unchanged():
            return self._number
        for part in self._parts:
            part.require_children()
        before, present = self._current, self._take()
        self._set(present)
        if before == present:
            return self._number
        for known, number in self._known:
            if known == present:
                self._number = number
                return number
        self._number = next(self._numbers)
        self._known = [*self._known[-STATES + 1 :], (present, self._number)]
        if self._number in MANY:
            changed = [k for k in {**before, **present} if before.get(k) != present.get(k)]
            warnings.warn(
                f"the model is captured for the {self._number + 1}th time because {changed[0]} "
                f"changed; each capture costs as much as a first step. {_CURE}",
                stacklevel=4,
            )
        return self._number

    def skeleton(self) -> nn.Module:
        """Return a copy without weights of the model as it is now."""
        root = self._modules[""]()
        if root is None and self._root_is_made:
            children = {path: ref() for path, ref in self._modules.items() if path.isidentifier()}
            if all(child is not None for child in children.values()):
                root = nn.ModuleDict(children)  # type: ignore[arg-type]
                root.training = self._mode()
        if root is None:
            raise ProgramError(
                "a part of the model has changed, but the model itself is gone",
                hint="keep a reference to what was given to parallelize",
            )
        return skeleton(root)

    def _mode(self) -> bool:
        """The flag that others are compared with: train() and eval() change all of them alike."""
        root = self._modules[""]()
        if root is not None:
            return bool(root.training)
        return any(m.training for ref in self._modules.values() if (m := ref()) is not None)

    # --- every step --------------------------------------------------------------------------

    def _is_unchanged(self) -> bool:
        """Compare as little as tells; if in doubt, say no."""
        if not self._known or not all(part.is_unchanged() for part in self._parts):
            return False
        for variable, value in self._variables:
            if variable.read() is not value:
                return False
        names = self.reads.reach.names
        memo: dict[int, Any] = {}
        for get, taken in self._others:
            value = get()
            if value is _GONE:
                continue
            if id(value) not in memo:
                memo[id(value)] = snapshot(value, names)
            if memo[id(value)] != taken:
                return False
        return self._hook_keys() == self._hooks

    def _hook_keys(self) -> list[int]:
        """The keys of hooks of parameters and of all modules; a new hook has a new key."""
        found = [key for kind in _GLOBAL_HOOKS for key in _GLOBAL[kind]]
        for _, ref in self._parameters:
            parameter: Any = ref()
            if parameter is not None:
                if parameter._backward_hooks:
                    found += parameter._backward_hooks
                if parameter._post_accumulate_grad_hooks:
                    found += parameter._post_accumulate_grad_hooks
        return found

    def _set(self, present: Snapshots) -> None:
        """Prepare the comparisons of every step."""
        self._current, self._hooks = present, self._hook_keys()
        self._variables, self._others = [], []
        for variable in self.reads.reach.variables.values():
            value = variable.read()
            if isinstance(value, _BY_IDENTITY):
                self._variables.append((variable, value))
            else:
                self._others.append((variable.read, present[_variable_key(variable)]))
        by_path: dict[str, list[str]] = {}
        for path, name in self.reads.attributes:
            by_path.setdefault(path, []).append(name)
        for part in self._parts:
            names = by_path.get(part.path, [])
            for get, name in part.prepare(names):
                self._others.append((get, present[f"the attribute {_dotted(part.path, name)}"]))

    # --- snapshots ---------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[str, Any]]:
        """What to compare, with a name for each: attributes, variables, hooks."""
        mode = self._mode()
        for path, name in self.reads.attributes:
            module = self._modules[path]()
            if module is not None and name == "training":
                yield f"the attribute {_dotted(path, name)}", module.training == mode
            else:
                yield f"the attribute {_dotted(path, name)}", _get(self._modules[path], name)
        for variable in self.reads.reach.variables.values():
            yield _variable_key(variable), variable.read()
        for kind in _GLOBAL_HOOKS:
            yield f"the global {kind}", list(_GLOBAL[kind].values())
        for part in self._parts:
            yield f"a hook of {part.path or 'the model'}", part.hooks()
        for name, ref in self._parameters:
            parameter = ref()
            yield f"a hook of {name}", _GONE if parameter is None else hooks_of(parameter)

    def _take(self) -> Snapshots:
        names = self.reads.reach.names
        memo: dict[int, Any] = {}  # by id, with the values, so that ids stay theirs
        found: Snapshots = {}
        for key, value in self._values():
            if value is _GONE:  # as it was: nobody can change it
                found[key] = self._current.get(key)
                continue
            if id(value) not in memo:
                memo[id(value)] = (value, snapshot(value, names))
            found[key] = memo[id(value)][1]
        return found


class _Part:
    """One module: what its attributes were, and which modules it has."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self._ref = path, weakref.ref(module)
        self._children = [
            (name, weakref.ref(child))
            for name, child in module._modules.items()
            if child is not None
        ]
        self._attributes: list[tuple[str, Any]] = []
        self._num_hooks = 0

    def prepare(self, names: list[str]) -> Iterator[tuple[Callable[[], Any], str]]:
        """Keep the attributes that are compared by identity; give the others."""
        module = self._ref()
        self._attributes = []
        if module is None:
            return
        own = vars(module)
        self._num_hooks = _num_hooks(own)
        for name in names:
            if isinstance(own.get(name, MISSING), _BY_IDENTITY):
                self._attributes.append((name, own[name]))
            else:
                yield functools.partial(_get, self._ref, name), name

    def is_unchanged(self) -> bool:
        """Whether attributes, hooks and modules are those that they were."""
        module = self._ref()
        if module is None:
            return True
        own = module.__dict__
        for name, value in self._attributes:
            if own.get(name, MISSING) is not value:
                return False
        modules = own["_modules"]
        for name, ref in self._children:
            if modules.get(name) is not ref():
                return False
        return _num_hooks(own) == self._num_hooks

    def require_children(self) -> None:
        """Raise if a module was replaced."""
        module = self._ref()
        for name, ref in self._children if module is not None else ():
            if module._modules.get(name) is not ref():  # type: ignore[union-attr]
                raise ProgramError(
                    "this part of the model was replaced after parallelize, and the new one is "
                    "not what is being trained",
                    where=_dotted(self.path, name),
                    hint="parallelize again, or give its values to pm.load_state_dict",
                )

    def hooks(self) -> Any:
        """Forward and backward hooks, without our own."""
        module = self._ref()
        if module is None:
            return _GONE
        found = [hook for kind in _HOOKS for hook in vars(module)[kind].values()]
        return [hook for hook in found if not type(hook).__module__.startswith("shardwise.")]


def _num_hooks(own: dict[str, Any]) -> int:
    """How often hooks were registered: a new one has a new key, the last one."""
    forward, before = own["_forward_hooks"], own["_forward_pre_hooks"]
    if not forward and not before and not own["_backward_hooks"] and not own["_backward_pre_hooks"]:
        return 0
    return hash(tuple(key for kind in _HOOKS for key in own[kind]))


def _get(ref: Callable[[], Any], name: str) -> Any:
    module = ref()
    return _GONE if module is None else getattr(module, name, MISSING)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _variable_key(variable: Variable) -> str:
    return f"the variable {variable.name} ({variable.place}) {id(variable.home)}"
