"""Trace hooks that change gradients.

Forward hooks need nothing: capture runs them with their module. A hook that runs in backward is
traced on a gradient without data. On a parameter it becomes a `GradientHook`, which the runtime
applies to the complete gradient of a step; on an activation (`h.register_hook` inside forward) it
becomes the backward of an identity node. A hook that is not a tensor computation, or of a kind that
has no counterpart on several ranks, is refused with the place of its definition.
"""

import contextlib
import functools
import hashlib
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import CaptureError, ShardwiseError
from shardwise.frontend.convert import Recorder, record_call
from shardwise.frontend.errors import Frame, is_user_code, running_frame
from shardwise.frontend.snapshots import cell_value
from shardwise.frontend.tracing import patched
from shardwise.ir import GradientHook, tensor_bytes

Hook = Callable[..., Any]
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SHAPELESS = ("aten.detach.default", "aten.clone.default", "aten._to_copy.default", "aten.alias")


def gradient_hooks(model: nn.Module) -> tuple[GradientHook, ...]:
    """Return the hooks on the model's parameters, traced, in the order in which they run."""
    hooks: list[GradientHook] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        for kind in _KINDS:
            for hook in (getattr(parameter, kind) or {}).values():
                traced = trace(hook, parameter, f"parameter {name}", accumulated=kind == _KINDS[1])
                hooks.append(
                    GradientHook(
                        parameter=name,
                        accumulated=kind == _KINDS[1],
                        name=name_of(hook),
                        source=place_of(hook),
                        code=traced.code,
                        elementwise=traced.elementwise,
                        needs_value=traced.needs_value,
                        function=traced,
                    )
                )
    return tuple(hooks)


def hook_dicts(parameter: torch.Tensor) -> list[dict[int, Hook]]:
    """Return a parameter's gradient hooks by key, those before accumulation first."""
    return [hooks for kind in _KINDS if (hooks := getattr(parameter, kind))]


def hooks_of(parameter: torch.Tensor) -> list[Hook]:
    """Return the gradient hooks of a parameter, before and after accumulation."""
    return [hook for hooks in hook_dicts(parameter) for hook in hooks.values()]


def module_hooks(module: nn.Module, kind: str) -> list[Hook]:
    """Return a module's hooks of one of the `MODULE_HOOKS`, except our own."""
    hooks = vars(module)[kind].values()
    return [hook for hook in hooks if not type(hook).__module__.startswith("shardwise.")]


def copy_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the hooks of a parameter to its copy: `deepcopy` does not."""
    for kind in _KINDS:
        if hooks := getattr(source, kind):
            setattr(target, kind, OrderedDict(hooks))


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Make two parameters share their hooks, also those registered or removed later."""
    for kind in _KINDS:
        if getattr(source, kind) is None:
            setattr(source, kind, OrderedDict())
        setattr(target, kind, getattr(source, kind))


def check_module_hooks(model: nn.Module) -> None:
    """Refuse backward hooks of modules: they need the gradients of full activations."""
    registered = [
        (f"module {path}" if path else "the model", hook)
        for path, module in model.named_modules()
        for hooks in (module._backward_pre_hooks, module._backward_hooks)
        for hook in hooks.values()
    ]
    everywhere = nn.modules.module
    for hooks in (everywhere._global_backward_pre_hooks, everywhere._global_backward_hooks):
        registered += [("every module (a global hook)", hook) for hook in hooks.values()]
    for owner, hook in registered:
        raise CaptureError(
            f"the backward hook {name_of(hook)} on {owner} cannot be captured",
            where=place_of(hook),
            hint="output.register_hook(f) in forward or in a forward hook, or "
            "parameter.register_hook(f)",
        )


# ---------------------------------------------------------------- tracing
class TracedHook:
    """One hook as a graph of tensor operations: `hook(gradient, value)`."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        _, value = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.needs_value = bool(value.users)
        calls = [n for n in module.graph.nodes if n.op == "call_function"]
        self.elementwise = (
            not self.needs_value
            and all(_is_elementwise(n) for n in calls)
            and all(t.dim() == 0 for t in self.constants)
        )
        digest = hashlib.sha256()
        for tensor in self.constants:
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor_bytes(tensor))
        body = "; ".join(line.strip() for line in module.code.strip().splitlines()[1:])
        self.code = f"{body} [{digest.hexdigest()[:12]}]" if self.constants else body

    @property
    def constants(self) -> list[torch.Tensor]:
        """Return the tensors that the hook reads besides the gradient."""
        names = [str(n.target) for n in self.module.graph.nodes if n.op == "get_attr"]
        return [getattr(self.module, name) for name in dict.fromkeys(names)]

    def __call__(self, gradient: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
        if any(t.device != gradient.device for t in self.constants):
            self.module.to(gradient.device)
        with torch.no_grad():
            result: torch.Tensor = self.module(gradient, value)
        return result


def trace(
    hook: Hook, hooked: torch.Tensor, target: str, *, accumulated: bool = False
) -> TracedHook:
    """Trace a hook on a gradient of `hooked`; refuse it if it does anything but compute."""
    device = torch.device("cpu") if hooked.is_meta else hooked.device
    shape, dtype = hooked.shape, hooked.dtype
    with FakeTensorMode(allow_non_fake_inputs=True):
        grad, value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))

    def run(grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not accumulated:
            result = hook(grad)
            return grad if result is None else result
        value.grad = grad
        if hook(value) is not None:
            raise CaptureError("it returns a value, which torch does not allow after accumulation")
        if value.grad is None:
            raise CaptureError("it removes the gradient")
        return value.grad

    refuse = functools.partial(_refusal, hook, target)
    if _is_multi_gradient(hook):
        raise refuse("it takes the gradients of several tensors (register_multi_grad_hook)")
    stepping = register_optimizer_step_pre_hook(_refuse_step)
    try:
        module = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(grad, value)
    except Exception as error:
        raise refuse(_reason(error)) from error
    finally:
        stepping.remove()
    _check(module, grad, refuse, hook)
    return TracedHook(module)


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Without gradients the step does nothing, so that tracing would not notice it.
    raise CaptureError(f"it steps an optimizer ({type(optimizer).__name__})")


def _reason(error: Exception) -> str:
    if isinstance(error, ShardwiseError):
        return error.message
    if "DataDependent" in type(error).__name__:
        return "Python code in it depends on the gradient's values (if, item, print)"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check(
    module: fx.GraphModule, grad: torch.Tensor, refuse: Callable[[str], CaptureError], hook: Hook
) -> None:
    """Refuse randomness, writes, weights of the model, and results of another shape."""
    outside: set[fx.Node] = set()  # the parameter's value, tensors from outside, and their views
    owned = _tensors_of_modules(hook)
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.prev.op == "placeholder":
            outside.add(node)
        elif node.op == "get_attr":
            outside.add(node)
            tensor = getattr(module, str(node.target))
            if isinstance(tensor, nn.Parameter) or id(tensor) in owned:
                raise refuse("it reads a tensor of the model, not the copy that is trained")
        elif node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise refuse(f"it draws random numbers ({node.target})")
            for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
                if argument.alias_info is None or value not in outside:
                    continue
                if argument.alias_info.is_write:
                    raise refuse(f"it writes to a tensor besides the gradient ({node.target})")
                outside.add(node)
    result = next(n for n in module.graph.nodes if n.op == "output").args[0]
    new = result.meta["val"] if isinstance(result, fx.Node) else None
    if not isinstance(new, torch.Tensor) or new.shape != grad.shape:
        shape = tuple(new.shape) if isinstance(new, torch.Tensor) else result
        raise refuse(f"it returns {shape} for a gradient of shape {tuple(grad.shape)}")


def _tensors_of_modules(hook: Hook) -> set[int]:
    """Return the ids of tensors of modules that the hook is a method of, or has in its closure."""
    function = inspect.unwrap(getattr(hook, "func", hook))
    values = [getattr(function, "__self__", None)]
    values += map(cell_value, getattr(function, "__closure__", None) or ())
    modules = [value for value in values if isinstance(value, nn.Module)]
    return {id(t) for m in modules for t in (*m.parameters(), *m.buffers())}


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or str(node.target).startswith(_SHAPELESS)


def _refusal(hook: Hook, target: str, reason: str) -> CaptureError:
    return CaptureError(
        f"the gradient hook {name_of(hook)} on {target} cannot be captured: {reason}",
        where=place_of(hook),
        hint="compute the new gradient with torch operations and return it",
    )


def name_of(hook: Hook) -> str:
    """Return the qualified name of a hook's function."""
    function = _defined(hook)
    return getattr(function, "__qualname__", type(function).__qualname__)


def _defined(hook: Hook) -> Any:
    """Return the user's function behind a `functools.partial` or a wrapper of torch's."""
    function = inspect.unwrap(getattr(hook, "func", hook))
    if _is_multi_gradient(function):
        cells = inspect.getclosurevars(function).nonlocals.values()
        return next((cell for cell in cells if inspect.isfunction(cell)), function)
    return function


def _is_multi_gradient(hook: Hook) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.graph.__file__


def place_of(hook: Hook) -> str:
    """Return `file.py:line` where a hook's function is defined."""
    function = _defined(hook)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else name_of(hook)


# ---------------------------------------------------------------- hooks registered in forward
@dataclass(slots=True)
class _Handle:
    """The handle that `register_hook` returns while capturing."""

    name: str

    def remove(self) -> None:
        raise CaptureError(f"forward removes the hook {self.name} again")


@contextlib.contextmanager
def recording_hooks(recorder: Recorder) -> Iterator[None]:
    """Record hooks on activations as identity nodes; refuse hooks of other kinds."""
    hooked: list[tuple[Any, Hook, torch.Tensor, Frame | None]] = []
    register, saved = torch.Tensor.register_hook, torch.autograd.graph.saved_tensors_hooks

    def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
        if get_proxy_mode() is None or recorder.depth or not tensor.requires_grad:
            return register(tensor, hook)  # type: ignore[no-untyped-call]
        if isinstance(tensor, nn.Parameter):
            raise CaptureError(
                f"forward registers the hook {name_of(hook)} on a parameter, once more each step",
                hint="register it once, in __init__ or before parallelize",
            )
        cls = _identity(name_of(hook))
        hooked.append((cls, hook, tensor, running_frame()))
        _put_behind(tensor, record_call(recorder, cls, (tensor,), {}))
        return _Handle(name_of(hook))

    def enter_saved(context: Any) -> None:
        if not isinstance(context, torch.autograd.graph.save_on_cpu):
            raise CaptureError(
                "forward uses saved_tensors_hooks, which a captured graph cannot contain",
                hint="torch.utils.checkpoint to save memory; offload=('activations',) in the plan",
            )

    with patched(
        (torch.Tensor, "register_hook", register_hook),
        (torch.Tensor, "grad_fn", property(_grad_fn)),
        (saved, "__enter__", enter_saved),
        (saved, "__exit__", lambda *args: None),
    ):
        yield
    for cls, hook, tensor, frame in hooked:
        traced = trace(hook, tensor, f"an activation ({frame.place})" if frame else "an activation")
        digest = hashlib.sha256(traced.code.encode()).hexdigest()[:8]
        cls.traced = (traced,)  # in a tuple: a plain function would become a method
        cls.__qualname__ = f"hooks.<locals>.{cls.__name__}_{digest}"


def _identity(name: str) -> type:
    """Return an autograd function that returns its input, and whose backward is a hook."""

    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = cls.traced[0](grad.clone())  # type: ignore[attr-defined]
        return result

    plain = "Hook_" + re.sub(r"\W+", "_", name.rsplit(".", 1)[-1]).strip("_")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    cls = type(plain, (torch.autograd.Function,), {**methods, "__module__": __name__})
    return cls


def _put_behind(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Make every use of a traced tensor, past and future, a use of `result`."""
    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer
    slot = get_proxy_slot(result, tracer)
    before, after = get_proxy_slot(tensor, tracer).proxy.node, slot.proxy.node
    call: Any = after.args[0]  # `after` is an item of the call's result
    before.append(call)
    call.append(after)
    for user in list(before.users):
        if user is not call:
            user.replace_input_with(before, after)
    set_proxy_slot(tensor, tracer, slot)


def _grad_fn(tensor: torch.Tensor) -> Any:
    node = super(torch.Tensor, tensor).grad_fn
    caller = sys._getframe(1).f_code.co_filename
    return _NoHooks(node) if node is not None and is_user_code(caller) else node


class _NoHooks:
    """A node of the autograd graph that refuses hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if "hook" in name:
            raise CaptureError(
                f"forward calls grad_fn.{name}, which a captured graph cannot contain",
                hint="tensor.register_hook(f), where f maps a gradient to a gradient",
            )
        return getattr(self._node, name)
