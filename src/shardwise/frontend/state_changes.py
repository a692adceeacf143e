"""Detect changes of the Python state that captured programs depend on, before every step.

Each distinct state of everything that the captures of a model read (`Reads`) has a number, and
thereby its own programs. The model is referenced weakly: once it is gone, nobody can change it.
"""

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

from shardwise.errors import ProgramError
from shardwise.frontend.errors import Frame, user_stacklevel
from shardwise.frontend.fake import skeleton
from shardwise.frontend.hooks import MODULE_HOOKS, hook_dicts, hooks_of, module_hooks
from shardwise.frontend.python_state import Place, Reads, Variable
from shardwise.frontend.snapshots import INTERNAL, MISSING, Guards, Same, is_constant, snapshot

MAX_STATES = 64  # whose numbers are remembered
WARN_AT = (8, 64, 512)  # numbers of states at which to warn
_ID = " #"  # separates a variable's description from the id that makes it unique
_GLOBALS = vars(nn.modules.module)  # where hooks on all modules are registered
_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in MODULE_HOOKS)
_GONE = object()  # stands for a value of a module that no longer exists

Snapshots = dict[str, Any]


class NotComputed:
    """Stands for an attribute that forward assigns, on a model whose forward no longer runs.

    Parallel steps do not assign it, and a user would take the old value for the step's. Every use
    except `repr` raises.
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
        if name.startswith("__"):  # protocols such as copying look for special methods
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


def plain_attributes(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's own attributes that are neither methods nor properties."""
    members = [member for cls in type(model).__mro__ for member in vars(cls).items()]
    names = {name for name, value in members if not hasattr(type(value), "__get__")}
    return frozenset((names | set(vars(model))) - INTERNAL - {"training"})


class PythonState:
    """The Python state of one model, compared with that of its captures."""

    def __init__(self, model: nn.Module, registered: Callable[[], int]) -> None:
        """Watch `model`; `registered` counts the hooks that are registered on any tensor."""
        self.reads = Reads()
        self._is_mapping = isinstance(model, nn.ModuleDict)  # the user has its children only
        self._modules = {path: weakref.ref(m) for path, m in model.named_modules()}
        self._children = {
            (path, name): weakref.ref(child)
            for path, module in model.named_modules()
            for name, child in module._modules.items()
            if child is not None
        }
        self._parameters = [(n, weakref.ref(p)) for n, p in model.named_parameters()]
        self._number, self._numbers = 0, itertools.count(1)
        self._current: Snapshots = {}
        self.last_change = ""  # describes the first difference of the last change
        self._registered, self._num_registered = registered, 0
        self._hook_keys: list[int] = []  # of parameters
        self._states: list[tuple[Snapshots, int]] = []
        self._guards = Guards(frozenset())

    def add(self, reads: Reads) -> None:
        """Compare everything that captures have read, from now on."""
        self.reads = reads
        present = self._snapshots()
        for state, _ in self._states:  # programs do not depend on state that they did not read
            for key, value in present.items():
                state.setdefault(key, value)
        if not self._states:
            self._states.append((present, self._number))
        self._publish()
        self._guard(present)

    def _publish(self) -> None:
        """Give the model the attributes that its forward would have assigned.

        Values that are the same in all programs are set; others would be those of another step. An
        attribute that the model did not have stays missing if forward asks whether it exists.
        """
        for (path, name), write in self.reads.writes.items():
            module = self._modules[path]()
            if module is None or write.frame is None:
                continue
            if write.is_known:
                vars(module)[name] = write.value
            elif name in vars(module) or not write.is_asked:
                vars(module)[name] = NotComputed(_dotted(path, name), write.frame)

    def number(self) -> int:
        """Return the number of the present state; raise if parts of the model were replaced."""
        if not self._states or self._is_unchanged():  # without captures, nothing to compare
            return self._number
        self._check_children()
        before, present = self._current, self._snapshots()
        self._guard(present)
        if before == present:
            return self._number
        changed = next(k for k in {**before, **present} if before.get(k) != present.get(k))
        self.last_change = changed.split(_ID)[0]
        for state, number in self._states:
            if state == present:
                self._number = number
                return number
        self._number = next(self._numbers)
        self._states = [*self._states[-MAX_STATES + 1 :], (present, self._number)]
        if self._number in WARN_AT:
            warnings.warn(
                f"the model is captured for the {self._number + 1}th time because "
                f"{self.last_change} changed; each capture costs as much as a first step. Pass a "
                "value that changes often in the batch, as a tensor",
                stacklevel=user_stacklevel(),
            )
        return self._number

    def skeleton(self, last: nn.Module, *, is_changed: bool) -> nn.Module:
        """Return a copy without weights of the model as it is now; `last` is the previous one.

        With `is_changed`, programs depend on something that has changed since.
        """
        if all(ref() is None for ref in self._modules.values()):
            return last  # nobody can have changed the model, only variables outside of it
        root = self._modules[""]()
        if root is None and self._is_mapping:
            children = {path: ref() for path, ref in self._modules.items() if path.isidentifier()}
            if all(child is not None for child in children.values()):
                root = nn.ModuleDict(children)  # type: ignore[arg-type]
                root.training = self._training()
        if root is None and not is_changed:
            return last
        if root is None:
            raise ProgramError(
                "Python state has changed, and only some parts of the model still exist",
                hint="keep a reference to the model that was given to parallelize",
            )
        return skeleton(root)

    def _training(self) -> bool:
        """Return the mode that modules are compared with: train() and eval() set it for all."""
        root = self._modules[""]()
        if root is not None:
            return bool(root.training)
        return any(m.training for ref in self._modules.values() if (m := ref()) is not None)

    def _check_children(self) -> None:
        """Raise if a module was replaced or added."""
        for (path, name), ref in self._children.items():
            module = self._modules[path]()
            if module is not None and module._modules.get(name) is not ref():
                raise ProgramError(
                    "this part of the model was replaced after parallelize, and the new one is "
                    "not being trained",
                    where=_dotted(path, name),
                    hint="call parallelize again, or load its values with pm.load_state_dict",
                )
        for path, module_ref in self._modules.items():
            module = module_ref()
            for name, child in (module._modules if module is not None else {}).items():
                if child is not None and (path, name) not in self._children:
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
            if self._parameter_hook_keys() != self._hook_keys:
                return False
            self._num_registered = registered
        return self._guards.hold()

    def _parameter_hooks(self) -> Iterator[dict[int, Any]]:
        """Yield the hooks of all parameters, by key."""
        for _, ref in self._parameters:
            if (parameter := ref()) is not None:
                yield from hook_dicts(parameter)

    def _parameter_hook_keys(self) -> list[int]:
        """Return the keys of all hooks of parameters; a new hook has a new key."""
        return [key for hooks in self._parameter_hooks() for key in hooks]

    def _guard(self, present: Snapshots) -> None:
        """Prepare the comparisons of every step."""
        self._current = present
        self._num_registered, self._hook_keys = self._registered(), self._parameter_hook_keys()
        self._guards = guards = Guards(self.reads.reach.names)
        for hooks in (*(_GLOBALS[kind] for kind in _GLOBAL_HOOKS), *self._parameter_hooks()):
            guards.add_hooks(hooks)
        for variable in self.reads.reach.variables.values():
            value, home = variable.read(), variable.home
            if not (is_constant(value) or self._is_part(value)):
                guards.add_value(variable.read, present[_variable_key(variable)])
            elif isinstance(home, types.CellType):
                guards.add_constant(variable.read, value)
            else:
                namespace = home if isinstance(home, dict) else vars(home)
                guards.add_member(namespace, variable.name, value)
        attributes, methods = _by_path(self.reads.attributes), _by_path(self.reads.methods)
        for path, ref in self._modules.items():
            if (module := ref()) is None:
                continue
            for kind in MODULE_HOOKS:
                guards.add_hooks(vars(module)[kind])
            for name in guards.add_module(module, attributes[path], methods[path]):
                before = present[f"the attribute {_dotted(path, name)}"]
                guards.add_value(functools.partial(_get, ref, name), before)

    # --- snapshots ---------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes, variables and hooks to compare, with a description of each."""
        training = self._training()
        for path, name in self.reads.attributes:
            value = _get(self._modules[path], name)
            if name == "training" and value is not _GONE:
                value = value == training
            yield f"the attribute {_dotted(path, name)}", value
        for path, name in self.reads.methods:
            yield f"the method {_dotted(path, name)}", _get(self._modules[path], name)
        for variable in self.reads.reach.variables.values():
            value = variable.read()
            yield _variable_key(variable), Same(value) if self._is_part(value) else value
        yield "torch's default dtype", torch.get_default_dtype()
        for kind in _GLOBAL_HOOKS:
            yield f"the global {kind}", list(_GLOBALS[kind].values())
        for path, module_ref in self._modules.items():
            module = module_ref()
            hooks: Any = _GONE
            if module is not None:
                hooks = [hook for kind in MODULE_HOOKS for hook in module_hooks(module, kind)]
            yield f"a hook of {path or 'the model'}", hooks
        for name, ref in self._parameters:
            parameter = ref()
            yield f"a hook of {name}", _GONE if parameter is None else hooks_of(parameter)

    def _is_part(self, value: Any) -> bool:
        """Return whether a value is a module of the model, whose attributes are compared anyway."""
        refs = self._modules.values()
        return isinstance(value, nn.Module) and any(ref() is value for ref in refs)

    def _snapshots(self) -> Snapshots:
        names = self.reads.reach.names
        memo: dict[int, Any] = {}  # with the values, so that no id is reused
        snapshots: Snapshots = {}
        for key, value in self._values():
            if value is _GONE:  # nobody can change it
                snapshots[key] = self._current.get(key)
                continue
            if id(value) not in memo:
                memo[id(value)] = (value, snapshot(value, names))
            snapshots[key] = memo[id(value)][1]
        return snapshots


def _by_path(places: Iterable[Place]) -> defaultdict[str, list[str]]:
    names: defaultdict[str, list[str]] = defaultdict(list)
    for path, name in places:
        names[path].append(name)
    return names


def _get(ref: Callable[[], Any], name: str) -> Any:
    module = ref()
    if module is not None and name == "__dict__":
        return frozenset(vars(module))  # forward asks which attributes exist
    return _GONE if module is None else getattr(module, name, MISSING)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _variable_key(variable: Variable) -> str:
    return f"the variable {variable.name} ({variable.place}){_ID}{id(variable.home)}"
