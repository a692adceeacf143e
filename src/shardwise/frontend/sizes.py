"""Share one trace between batches of many sizes.

A step is exported once with symbolic sizes. While Python runs, torch records every condition on
them that it evaluates (`if x.shape[1] > 128`) as a guard. For other sizes that satisfy all guards
the same trace is valid: numbers replace its symbols, and the usual conversion makes a graph without
running Python again. Sizes that violate a guard take another path through the program and are
captured separately.
"""

import contextlib
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FrameType
from typing import Any, TypedDict

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from shardwise.batch import Call, read_batch
from shardwise.errors import CaptureError, ShardwiseError
from shardwise.frontend.capture import Traced, capture, trace_step
from shardwise.frontend.graph_cache import cached_capture
from shardwise.frontend.objective import Model, Objective, as_module
from shardwise.frontend.python_state import Reads
from shardwise.frontend.tracing import patched
from shardwise.ir import Graph

STATIC_CAPTURES = 2  # of batches that differ only in sizes, before a symbolic capture
SYMBOLIC_CAPTURES = 6  # per kind of batch: guards may divide sizes into several ranges

Shapes = tuple[tuple[int, ...], ...]


class _Options(TypedDict):
    training: bool | None
    device: torch.device | str | None


_PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_SYMBOLIC = tuple(_PLAIN)


class GraphsBySize:
    """Capture the step of one model; batches of different sizes share a trace if possible."""

    def __init__(self) -> None:
        # Fingerprints of captures without symbols.
        self._fingerprints: defaultdict[Hashable, dict[Shapes, str]] = defaultdict(dict)
        self._traces: defaultdict[Hashable, list[SizedTrace]] = defaultdict(list)
        self._attempts: Counter[Hashable] = Counter()
        self.num_traces = 0  # how often Python ran

    def __call__(
        self,
        model: Model,
        batch: Any,
        chosen: Objective = None,
        *,
        training: bool | None = None,
        device: torch.device | str | None = None,
        reads: Reads | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> Graph:
        """Capture as `capture` does; the model and all it reads must be the same in every call."""
        call = read_batch(batch)
        kind, shapes = _kind(call, training), _shapes(call)
        for trace in self._traces[kind]:
            if (graph := trace.graph(call)) is not None:
                return graph
        options: _Options = {"training": training, "device": device}
        fingerprints = self._fingerprints[kind]
        stored = cached_capture(as_module(model), call, chosen, options)
        graph = None if stored is None else stored.load(as_module(model), reads)
        if graph is None:
            self.num_traces += 1
            graph = self._graph_by_symbols(model, batch, chosen, options, reads)
            if graph is not None:
                return graph
            run_capture = functools.partial(capture, model, batch, chosen, buffers=buffers)
            if stored is None:
                graph = run_capture(reads=reads, **options)
            else:
                with stored.storing(reads) as run:
                    run.graph = graph = run_capture(reads=run.reads, **options)
        if len(fingerprints) < STATIC_CAPTURES:
            fingerprints[shapes] = graph.fingerprint
        return graph

    def _graph_by_symbols(
        self, model: Model, batch: Any, chosen: Objective, options: _Options, reads: Reads | None
    ) -> Graph | None:
        """Return the graph by a new symbolic trace, if it is due and the code accepts symbols.

        A symbolic trace costs more than a capture, so it is tried only after several sizes. It is
        used only if its graphs equal those of captures without symbols.
        """
        call = read_batch(batch)
        kind, shapes = _kind(call, options["training"]), _shapes(call)
        fingerprints = self._fingerprints[kind]
        dims = _varying([*fingerprints, shapes])
        # torch does not make sizes of 0 and 1 symbolic.
        tiny = any(shape[d] < 2 for shape, own in zip(shapes, dims, strict=True) for d in own)
        is_due = len(fingerprints) >= STATIC_CAPTURES and any(dims) and not tiny
        if not is_due or self._attempts[kind] >= SYMBOLIC_CAPTURES:
            return None
        self._attempts[kind] += 1
        try:
            with _symbols_as_numbers():
                trace = SizedTrace(trace_step(model, batch, chosen, dims=dims, **options))
        except ShardwiseError:  # capturing this batch without symbols succeeds, or has the error
            trace = None
        if trace is not None and trace.agrees(call, fingerprints):
            if not trace.is_checked:  # no capture without symbols has taken this path yet
                checked = capture(model, batch, chosen, reads=reads, **options)
                fingerprints[shapes] = checked.fingerprint
            graph = trace.graph(call) if trace.agrees(call, fingerprints) else None
            if graph is not None:
                self._traces[kind].append(trace)
                if reads is not None:
                    reads.add(trace.watch.reads)
                return graph
        self._attempts[kind] = SYMBOLIC_CAPTURES
        return None


def _kind(call: Call, training: bool | None) -> Hashable:
    """Return everything that a capture depends on except the sizes of tensors."""
    tensors = tuple((path, t.dtype, t.dim(), t.requires_grad) for path, t in call.tensors)
    return training, call.kind, str(call.spec), tensors, repr(call.constants)


def _shapes(call: Call) -> Shapes:
    return tuple(tuple(tensor.shape) for _, tensor in call.tensors)


def _varying(shapes: list[Shapes]) -> list[list[int]]:
    """Return for every tensor the dims that differ between batches."""
    return [
        [dim for dim, sizes in enumerate(zip(*own, strict=True)) if len(set(sizes)) > 1]
        for own in zip(*shapes, strict=True)
    ]


def _symbols_as_numbers() -> contextlib.AbstractContextManager[None]:
    """Make symbols look like numbers to the user's code where torch would record no guard.

    A size that becomes text (a key of a cache) is no longer a symbol. `isinstance(size, int)` must
    be true, as it is without symbols; it asks for `__class__`, which only a class can define, so
    that `__getattribute__` has to answer.
    """

    def attribute(symbol: Any, name: str) -> Any:
        if name == "__class__" and not _called_by_torch():
            return _PLAIN[type(symbol)]
        return object.__getattribute__(symbol, name)

    original = torch.SymInt.__repr__

    def text(size: torch.SymInt) -> str:
        return str(original(size) if _called_by_torch() else int(size))  # type: ignore[no-untyped-call]

    return patched(
        (torch.SymInt, "__repr__", text),
        *((cls, "__getattribute__", attribute) for cls in _SYMBOLIC),
    )


def _called_by_torch() -> bool:
    """Return whether the caller's caller is torch or this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "abc":
        frame = frame.f_back  # isinstance with an abstract class such as numbers.Integral
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("torch", "sympy", "shardwise")


class SizedTrace:
    """A traced step with symbolic sizes, and the guards under which it is valid."""

    def __init__(self, traced: Traced) -> None:
        self._traced, self.watch = traced, traced.watch
        self.is_checked = False  # whether it was compared with a capture without symbols
        program = traced.program
        specs = program.graph_signature.input_specs
        nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
        self._inputs = [
            node.meta["val"]
            for node, spec in zip(nodes, specs, strict=True)
            if spec.kind is InputKind.USER_INPUT
        ]
        self._values = [
            (node, node.meta["val"])
            for module in program.graph_module.modules()
            if isinstance(module, fx.GraphModule)
            for node in module.graph.nodes
            if "val" in node.meta
        ]
        if traced.step.outputs[0].has_symbols:
            raise CaptureError("the model returns a number that depends on sizes")
        if traced.changes:
            raise CaptureError("the step changes state, which may depend on sizes")
        symbols = [s for value in self._inputs for s in value.shape if _is_free(s)]
        if not symbols:
            raise CaptureError("the model depends on every size of the batch")
        environment = symbols[0].node.shape_env
        self._guards: str = environment.produce_guards_expression(self._inputs, ignore_static=False)
        self._holds: Callable[[str, list[Any]], bool] = environment.evaluate_guards_expression
        bound = self._sizes([tuple(value.shape) for value in self._inputs])
        for _, value in self._values:
            for symbol in _symbols(value):
                if not symbol.node.expr.free_symbols <= set(bound):
                    raise CaptureError("a size depends on the batch's values")

    def agrees(self, call: Call, fingerprints: Mapping[Shapes, str]) -> bool:
        """Compare the graphs of this trace with those of captures without symbols.

        Guards cover all computations with sizes. Code that tests the type of a number leaves none,
        but then the graph differs from that of a capture without symbols.
        """
        for shapes, fingerprint in fingerprints.items():
            tensors = [
                torch.empty(shape, dtype=tensor.dtype, device="meta")
                for shape, (_, tensor) in zip(shapes, call.tensors, strict=True)
            ]
            graph = self.graph(read_batch(call.batch_with(tensors)))
            if graph is not None:
                self.is_checked = True
                if graph.fingerprint != fingerprint:
                    return False
        return True

    def graph(self, call: Call) -> Graph | None:
        """Return the graph for a batch, or None if its sizes violate a guard."""
        tensors = [tensor for _, tensor in call.tensors]
        if not self._holds(self._guards, tensors):
            return None
        numbers = _Numbers(self._sizes(_shapes(call)))
        for node, value in self._values:
            node.meta["val"] = numbers.substitute(value)
        try:
            return self._traced.graph(call)
        finally:
            for node, value in self._values:
                node.meta["val"] = value

    def _sizes(self, shapes: Any) -> dict[Any, Any]:
        """Return the value of every symbol that is a size of an input."""
        return {
            size.node.expr: number
            for value, shape in zip(self._inputs, shapes, strict=True)
            for size, number in zip(value.shape, shape, strict=True)
            if _is_free(size) and size.node.expr.is_symbol
        }


def _is_free(size: Any) -> bool:
    """Return whether a size can have several values."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _symbols(value: Any) -> Iterator[Any]:
    """Yield all symbolic numbers in the value of a node."""
    for leaf in pytree.tree_leaves(value):
        parts = (leaf,)
        if isinstance(leaf, torch.Tensor):
            parts = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
        yield from (part for part in parts if isinstance(part, _SYMBOLIC))


class _Numbers:
    """Replace symbols by numbers; tensors that share memory still do."""

    def __init__(self, sizes: Mapping[Any, int]) -> None:
        self._sizes = sizes
        self._memo: dict[Any, int] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def substitute(self, value: Any) -> Any:
        """Return the value of a node for these sizes."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            return type(value)(self.substitute(item) for item in value)
        if isinstance(value, torch.SymInt):
            return self._number(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            return None  # recomputed by Python's operators, which round as the model would
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided:
            return value
        address = value.untyped_storage()._cdata
        if address not in self._storages:
            memory = torch.empty(0, dtype=torch.uint8, device="meta")
            self._storages[address] = memory.untyped_storage()
        tensor = torch.empty(0, dtype=value.dtype, device="meta")
        shape = [self._number(size) for size in value.shape]
        stride = [self._number(step) for step in value.stride()]
        offset = self._number(value.storage_offset())
        with torch.no_grad():
            tensor.set_(self._storages[address], offset, shape, stride)
        return tensor

    def _number(self, size: int | torch.SymInt) -> int:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression not in self._memo:
            self._memo[expression] = int(expression.xreplace(self._sizes))
        return self._memo[expression]
