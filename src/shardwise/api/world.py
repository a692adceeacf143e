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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.api.guards import Guards, is_constant
from shardwise.api.originals import user_level
from shardwise.errors import ProgramError
from shardwise.frontend import skeleton
from shardwise.frontend.errors import Frame
from shardwise.frontend.hooks import hooks_of
from shardwise.frontend.python_state import (
    INTERNAL,
    MISSING,
    Place,
    Reads,
    Same,
    Variable,
    snapshot,
)

_ID = " #"  # before what tells variables of one name apart
STATES = 64  # whose numbers are remembered
MANY = (8, 64, 512)  # numbers of states at which to warn
_CURE = "pass a value that changes often in the batch, as a tensor"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = vars(nn.modules.module)  # where hooks of all modules are
_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in _HOOKS)

_GONE = object()  # stands for a module that no longer exists

Snapshots = dict[str, Any]


class NotComputed:
    """Stands for an attribute that forward assigns, on a model whose forward no longer runs.

    Parallel steps do not assign it, and the value from before would be taken for the step's. Every
    use but the text raises.
    """

    def __init__(self, name: str, frame: Frame) -> None:
        vars(self).update(name=name, frame=str(frame))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ProgramError(
            f"forward assigns the attribute {vars(self)['name']}, which parallel steps do not",
            where=vars(self)["frame"],
            hint="return the value from forward: loss, output = pm.train_step(batch, outputs=True)",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copying ask whether there is such a method
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions of torch."""
        used = [*args, *(kwargs or {}).values()]
        next(value for value in used if isinstance(value, cls))._refuse()

    def __repr__(self) -> str:
        return f"<{vars(self)['name']} is not computed by parallel steps ({vars(self)['frame']})>"

    __hash__ = object.__hash__
    __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __index__ = __array__ = __neg__ = __abs__ = _refuse
    __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __matmul__ = _refuse


def attributes_of(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's own attributes that are plain values."""
    names = {n for cls in type(model).__mro__ for n, v in vars(cls).items() if _is_value(v)}
    return frozenset((names | set(vars(model))) - INTERNAL - {"training"})


def _is_value(member: Any) -> bool:
    return not hasattr(type(member), "__get__")


class PythonState:
    """Compares a model's Python state with that of its captures."""

    def __init__(self, model: nn.Module, registered: Callable[[], int]) -> None:
        """Compare the state of `model`; `registered` counts hooks as they are registered."""
        self.reads = Reads()
        self._root_is_made = isinstance(model, nn.ModuleDict)  # of a mapping: nobody holds it
        self._modules = {path: weakref.ref(m) for path, m in model.named_modules()}
        self._children = [
            (path, name, weakref.ref(child))
            for path, module in model.named_modules()
            for name, child in module._modules.items()
            if child is not None
        ]
        self._parameters = [(n, weakref.ref(p)) for n, p in model.named_parameters()]
        self._number, self._numbers = 0, itertools.count(1)
        self._current: Snapshots = {}
        self.last_change = ""  # what was different when the state changed last
        self._registered, self._num_registered = registered, 0
        self._hooks: list[int] = []  # of parameters
        self._known: list[tuple[Snapshots, int]] = []
        self._guards = Guards(frozenset())

    def add(self, reads: Reads) -> None:
        """Compare from now on what captures have read by now."""
        self.reads = reads
        present = self._take()
        for known, _ in self._known:  # programs do not depend on what they did not read
            for key, value in present.items():
                known.setdefault(key, value)
        if not self._known:
            self._known.append((present, self._number))
        self._publish()
        self._set(present)

    def _publish(self) -> None:
        """Give the model the attributes that its forward would have assigned.

        Values that are the same in all programs are set; others would be those of another step. An
        attribute that the model did not have stays missing: forward may ask whether it has one.
        """
        for (path, name), write in self.reads.writes.items():
            module = self._modules[path]()
            if module is None or write.frame is None:
                continue
            old = vars(module).get(name, MISSING)
            if write.is_known:
                vars(module)[name] = write.value
            elif old is not MISSING:
                vars(module)[name] = NotComputed(_dotted(path, name), write.frame)

    def number(self) -> int:
        """Return the number of the present state; raise if parts of the model were replaced."""
        if not self._known or self._is_unchanged():  # without captures, nothing to compare
            return self._number
        self._require_children()
        before, present = self._current, self._take()
        self._set(present)
        if before == present:
            return self._number
        changed = [k for k in {**before, **present} if before.get(k) != present.get(k)]
        self.last_change = changed[0].split(_ID)[0]
        for known, number in self._known:
            if known == present:
                self._number = number
                return number
        self._number = next(self._numbers)
        self._known = [*self._known[-STATES + 1 :], (present, self._number)]
        if self._number in MANY:
            warnings.warn(
                f"the model is captured for the {self._number + 1}th time because "
                f"{self.last_change} "
                f"changed; each capture costs as much as a first step. {_CURE}",
                stacklevel=user_level(),
            )
        return self._number

    def skeleton(self, last: nn.Module, *, is_changed: bool) -> nn.Module:
        """Return a copy without weights of the model as it is now; `last` is the one before.

        `is_changed` says that programs depend on something that is different now.
        """
        if all(ref() is None for ref in self._modules.values()):
            return last  # nobody can have changed the model; what changed is a variable outside it
        root = self._modules[""]()
        if root is None and self._root_is_made:
            children = {path: ref() for path, ref in self._modules.items() if path.isidentifier()}
            if all(child is not None for child in children.values()):
                root = nn.ModuleDict(children)  # type: ignore[arg-type]
                root.training = self._mode()
        if root is None and not is_changed:
            return last
        if root is None:
            raise ProgramError(
                "Python state has changed, and only some parts of the model still exist",
                hint="keep a reference to the whole model that was given to parallelize",
            )
        return skeleton(root)

    def _mode(self) -> bool:
        """The flag that others are compared with: train() and eval() change all of them."""
        root = self._modules[""]()
        if root is not None:
            return bool(root.training)
        return any(m.training for ref in self._modules.values() if (m := ref()) is not None)

    def _require_children(self) -> None:
        """Raise if a module was replaced."""
        for path, name, ref in self._children:
            module = self._modules[path]()
            if module is not None and module._modules.get(name) is not ref():
                raise ProgramError(
                    "this part of the model was replaced after parallelize, and the new one is "
                    "not being trained",
                    where=_dotted(path, name),
                    hint="call parallelize again, or load its values with pm.load_state_dict",
                )
        known = {(path, name) for path, name, _ in self._children}
        for path, ref in self._modules.items():
            module = ref()
            for name, child in (module._modules if module is not None else {}).items():
                if child is not None and (path, name) not in known:
                    raise ProgramError(
                        "this part was added to the model after parallelize, and is not being "
                        "trained",
                        where=_dotted(path, name),
                        hint="call parallelize again",
                    )

    # --- every step --------------------------------------------------------------------------

    def _is_unchanged(self) -> bool:
        """Return whether cheap comparisons show that nothing changed; False if in doubt."""
        registered = self._registered()
        if registered != self._num_registered:  # perhaps on a parameter of the model
            if self._parameter_hooks() != self._hooks:
                return False
            self._num_registered = registered
        return self._guards.hold()

    def _parameter_hooks(self) -> list[int]:
        """The keys of the hooks of parameters; a new hook has a new key."""
        keys: list[int] = []
        for _, ref in self._parameters:
            parameter: Any = ref()
            if parameter is not None:
                keys += parameter._backward_hooks or ()
                keys += parameter._post_accumulate_grad_hooks or ()
        return keys

    def _set(self, present: Snapshots) -> None:
        """Prepare the comparisons of every step."""
        self._current = present
        self._num_registered, self._hooks = self._registered(), self._parameter_hooks()
        self._guards = guards = Guards(self.reads.reach.names)
        for kind in _GLOBAL_HOOKS:
            guards.add_hooks(_GLOBAL[kind])
        for _, ref in self._parameters:
            parameter: Any = ref()
            if parameter is not None and (hooks := parameter._backward_hooks):
                guards.add_hooks(hooks)
            if parameter is not None and (hooks := parameter._post_accumulate_grad_hooks):
                guards.add_hooks(hooks)
        for variable in self.reads.reach.variables.values():
            value, home = variable.read(), variable.home
            if not (is_constant(value) or self._is_part(value)):
                guards.add_value(variable.read, present[_variable_key(variable)])
            elif isinstance(home, types.CellType):
                guards.add_constant(variable.read, value)
            else:
                guards.add_member(
                    home if isinstance(home, dict) else vars(home), variable.name, value
                )
        attributes, methods = _by_path(self.reads.attributes), _by_path(self.reads.methods)
        for path, held in self._modules.items():
            module = held()
            if module is None:
                continue
            for kind in _HOOKS:
                guards.add_hooks(vars(module)[kind])
            for name in guards.add_module(module, attributes[path], methods[path]):
                taken = present[f"the attribute {_dotted(path, name)}"]
                guards.add_value(functools.partial(_get, held, name), taken)

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
        for path, name in self.reads.methods:
            yield f"the method {_dotted(path, name)}", _get(self._modules[path], name)
        for variable in self.reads.reach.variables.values():
            value = variable.read()
            yield _variable_key(variable), Same(value) if self._is_part(value) else value
        yield "torch's default dtype", torch.get_default_dtype()
        for kind in _GLOBAL_HOOKS:
            yield f"the global {kind}", list(_GLOBAL[kind].values())
        for path, held in self._modules.items():
            module = held()
            hooks: Any = _GONE if module is None else _hooks_of_module(module)
            yield f"a hook of {path or 'the model'}", hooks
        for name, ref in self._parameters:
            parameter = ref()
            yield f"a hook of {name}", _GONE if parameter is None else hooks_of(parameter)

    def _is_part(self, value: Any) -> bool:
        """Whether a value is the model or a part of it, which is compared by itself."""
        return isinstance(value, nn.Module) and any(
            ref() is value for ref in self._modules.values()
        )

    def _take(self) -> Snapshots:
        names = self.reads.reach.names
        memo: dict[int, Any] = {}  # by id, with the values, so that ids stay theirs
        snapshots: Snapshots = {}
        for key, value in self._values():
            if value is _GONE:  # as it was: nobody can change it
                snapshots[key] = self._current.get(key)
                continue
            if id(value) not in memo:
                memo[id(value)] = (value, snapshot(value, names))
            snapshots[key] = memo[id(value)][1]
        return snapshots


def _hooks_of_module(module: nn.Module) -> list[Any]:
    """Forward and backward hooks, without our own."""
    hooks = [hook for kind in _HOOKS for hook in vars(module)[kind].values()]
    return [hook for hook in hooks if not type(hook).__module__.startswith("shardwise.")]


def _by_path(places: Iterable[Place]) -> defaultdict[str, list[str]]:
    names: defaultdict[str, list[str]] = defaultdict(list)
    for path, name in places:
        names[path].append(name)
    return names


def _get(ref: Callable[[], Any], name: str) -> Any:
    module = ref()
    return _GONE if module is None else getattr(module, name, MISSING)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _variable_key(variable: Variable) -> str:
    return f"the variable {variable.name} ({variable.place}){_ID}{id(variable.home)}"
