"""JAX's calls, loops, branches, custom derivatives and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.extend import core
from torch import Tensor

from shardwise.integrations.jax.primitives import (
    Equation,
    Interpreter,
    Value,
    array_type,
    is_elementwise,
    primitive,
)

# Custom functions that torch has with the same derivative, by their names in JAX.
_SAME_DERIVATIVE: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "relu6": F.relu6}
_TOLERANCE = 1e-4


@primitive("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint",
           "composite", "core_closed_call")  # fmt: skip
def call(eqn: Equation, *values: Value) -> Value:
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return _run(eqn.run, jaxpr, values)


def _run(interpreter: Interpreter, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
    if isinstance(jaxpr, core.ClosedJaxpr):
        return interpreter.run(jaxpr.jaxpr, jaxpr.consts, values)
    return interpreter.run(jaxpr, (), values)


# ------------------------------------------------------------ custom derivatives
@primitive("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
def custom_derivative(eqn: Equation, *values: Value) -> Value:
    """Run a function whose derivative the user wrote.

    If the derivative equals that of its formula, autograd differentiates the formula. Otherwise JAX
    traces the user's derivative: of an elementwise function as a slope, which is sharded like any
    other value, of others as the backward pass of one node, which is replicated.
    """
    closed = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    name = str(eqn.params.get("name") or closed.jaxpr.debug_info.func_name)
    if name in _SAME_DERIVATIVE and len(values) == 1 and isinstance(values[0], Tensor):
        return _SAME_DERIVATIVE[name](values[0])
    if not eqn.run.is_differentiated:
        return _run(eqn.run, closed, values)
    trained = tuple(
        isinstance(value, Tensor) and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
        for value, variable in zip(values, closed.jaxpr.invars, strict=True)
    )
    derivative = _derivative(_Key(closed.jaxpr, trained, eqn, closed))
    if derivative.is_plain:
        return _run(eqn.run, closed, values)
    if derivative.is_elementwise:
        return _with_slopes(eqn.run, closed, derivative, values)
    run = replace(eqn.run, is_differentiated=False)

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(*tensors: Tensor) -> Any:
            results = tuple(run.tensor(v) for v in _run(run, closed, tensors))
            return results[0] if len(results) == 1 else results

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            backward = derivative.backward
            results = iter(_run(run, backward, (*ctx.saved_tensors, *gradients)))
            return tuple(run.tensor(next(results)) if needed else None for needed in trained)

    return Custom.apply(*eqn.tensors(*values))  # type: ignore[no-untyped-call]


class WithSlope(torch.autograd.Function):
    """A value, computed without gradient, that changes with `x` by `slope`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return gradient, gradient * slope, None


def _with_slopes(
    run: Interpreter, closed: Any, derivative: _Derivative, values: Sequence[Value]
) -> Tensor:
    """Return an elementwise function of values, with the user's derivative."""
    run = replace(run, is_differentiated=False)
    fixed = [v.detach() if isinstance(v, Tensor) else v for v in values]
    result = run.tensor(_run(run, closed, fixed)[0])
    slopes = iter(_run(run, derivative.backward, (*fixed, torch.ones_like(result))))
    for value, needed in zip(values, derivative.trained, strict=True):
        if needed:
            slope = run.tensor(next(slopes))
            result = WithSlope.apply(result, value, slope)  # type: ignore[no-untyped-call]
    return result


class _Derivative:
    """The user's derivative of a function by its `trained` inputs, traced by JAX."""

    def __init__(self, trained: Sequence[bool], eqn: Equation, closed: Any) -> None:
        avals = [array_type(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
        self.trained = trained

        def custom(*args: Any) -> Any:
            return tuple(eqn.bind(*args))

        def plain(*args: Any) -> Any:
            return tuple(core.jaxpr_as_fun(closed)(*args))

        def gradient(function: Any) -> Any:
            def run(*args: Any) -> Any:
                inputs, cotangents = args[: len(avals)], args[len(avals) :]
                floats = [a for a, needed in zip(inputs, trained, strict=True) if needed]

                def of_floats(*values: Any) -> Any:
                    given = iter(values)
                    return function(
                        *(
                            next(given) if needed else value
                            for value, needed in zip(inputs, trained, strict=True)
                        )
                    )

                return jax.vjp(of_floats, *floats)[1](tuple(cotangents))

            return run

        outs = [array_type(a.shape, a.dtype) for a in closed.out_avals]
        self.backward = jax.make_jaxpr(gradient(custom))(*avals, *outs)
        self.is_plain = _equal(gradient(custom), gradient(plain), [*avals, *outs])
        shapes = {aval.shape for aval, needed in zip(avals, trained, strict=True) if needed}
        self.is_elementwise = shapes == {outs[0].shape} and len(outs) == 1
        self.is_elementwise &= all(
            is_elementwise(jaxpr.jaxpr, outs[0].shape) for jaxpr in (closed, self.backward)
        )


@dataclass(frozen=True)
class _Key:
    """An equation as the key of a cache: equal if it is the same custom function and types."""

    jaxpr: Any  # compared by identity
    trained: tuple[bool, ...]
    eqn: Equation = field(compare=False)
    closed: Any = field(compare=False)


@lru_cache(maxsize=1024)
def _derivative(key: _Key) -> _Derivative:
    return _Derivative(key.trained, key.eqn, key.closed)


def _equal(one: Any, other: Any, avals: Sequence[Any]) -> bool:
    """Return whether two derivatives agree, on random inputs and where formulas have corners."""
    random = np.random.default_rng(0)
    for kind in range(4):
        args = []
        for aval in avals:
            if jnp.issubdtype(aval.dtype, jnp.inexact):
                array = 3 * random.standard_normal(aval.shape)
                array = np.round(array) if kind == 1 else array * (kind != 2)
            else:
                array = random.integers(0, 2, aval.shape)
            args.append(jnp.asarray(array, aval.dtype))
        with jax.ensure_compile_time_eval():
            results = one(*args), other(*args)
        for a, b in zip(*results, strict=True):
            if not np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                return False
    return True


# ------------------------------------------------------------ loops and branches
@primitive("scan")
def scan(eqn: Equation, *values: Value) -> Value:
    """Unroll a loop over the first dim of some inputs."""
    num_consts, num_carry = eqn["num_consts"], eqn["num_carry"]
    consts, carry = values[:num_consts], list(values[num_consts : num_consts + num_carry])
    scanned = [
        v if isinstance(v, Tensor) else np.asarray(v) for v in values[num_consts + num_carry :]
    ]
    stacked: list[list[Value]] = [[] for _ in eqn.results[num_carry:]]
    steps = range(eqn["length"])
    for step in reversed(steps) if eqn["reverse"] else steps:
        results = _run(eqn.run, eqn["jaxpr"], (*consts, *carry, *(x[step] for x in scanned)))
        carry = results[:num_carry]
        for items, value in zip(stacked, results[num_carry:], strict=True):
            items.append(value)
    outputs = [
        torch.stack(eqn.tensors(*(items[::-1] if eqn["reverse"] else items)))
        if items
        else torch.zeros(aval.shape, dtype=eqn.run.dtype(aval.dtype), device=eqn.run.device)
        for items, aval in zip(stacked, eqn.results[num_carry:], strict=True)
    ]
    return (*carry, *outputs)


@primitive("while")
def while_(eqn: Equation, *values: Value) -> Value:
    """Run a loop whose condition does not depend on parameters or batch."""
    num_cond, num_body = eqn["cond_nconsts"], eqn["body_nconsts"]
    cond, body = values[:num_cond], values[num_cond : num_cond + num_body]
    carry = list(values[num_cond + num_body :])
    while True:
        (goes_on,) = _run(eqn.run, eqn["cond_jaxpr"], (*cond, *carry))
        if isinstance(goes_on, Tensor):
            raise eqn.error(
                "the number of iterations of a while loop depends on parameters or the batch",
                hint="lax.fori_loop or lax.scan with a fixed length",
            )
        if not bool(goes_on):
            return tuple(carry)
        carry = _run(eqn.run, eqn["body_jaxpr"], (*body, *carry))


@primitive("cond")
def cond(eqn: Equation, index: Value, *values: Value) -> Value:
    """Run one of several branches."""
    if isinstance(index, Tensor):
        raise eqn.error(
            "the branch of lax.cond or lax.switch depends on parameters or the batch",
            hint="jnp.where(condition, a, b)",
        )
    branch = eqn["branches"][min(max(int(index), 0), len(eqn["branches"]) - 1)]
    return _run(eqn.run, branch, values)


# ------------------------------------------------------------ random numbers
@primitive("random_wrap", "random_unwrap")
def random_data(eqn: Equation, key: Value) -> Value:
    return key  # a key is its 32-bit words, in 64-bit integers


@primitive("random_bits", "random_fold_in", "random_split")
def random_numbers(eqn: Equation, key: Value, *more: Value) -> Value:
    """Run the generator of a key that is part of the batch, such as threefry."""
    implementation = eqn.operand_types[0].dtype._impl
    words = tuple(key.shape)[-len(implementation.key_shape) :]
    if words != tuple(key.shape):
        raise eqn.error("arrays of random keys in the batch are not supported", hint="one key")
    aval = array_type(words, jnp.uint32)
    if eqn.name == "random_bits":
        closed = jax.make_jaxpr(
            lambda k: implementation.random_bits(k, eqn["bit_width"], eqn["shape"])
        )(aval)
    elif eqn.name == "random_split":
        closed = jax.make_jaxpr(lambda k: implementation.split(k, eqn["shape"]))(aval)
    else:
        closed = jax.make_jaxpr(implementation.fold_in)(aval, array_type((), jnp.uint32))
    return _run(eqn.run, closed, (key, *more))


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MASK = 0xFFFFFFFF


@primitive("threefry2x32")
def threefry(eqn: Equation, first: Tensor, second: Tensor, a: Tensor, b: Tensor) -> Value:
    """Return two words of random bits for each counter (Salmon et al., 2011)."""
    keys = (first, second, first ^ second ^ 0x1BD11BDA)
    a, b = (a + keys[0]) & _MASK, (b + keys[1]) & _MASK
    for number in range(5):
        for rotation in _ROTATIONS[number % 2]:
            a = (a + b) & _MASK
            b = ((b << rotation) & _MASK | b >> (32 - rotation)) ^ a
        a = (a + keys[(number + 1) % 3]) & _MASK
        b = (b + keys[(number + 2) % 3] + number + 1) & _MASK
    return a, b
