"""How the copies of a parameter are kept equal: who stores it, and how its gradient gets there.

A `Sync` belongs to the parameters that match a glob of a plan. The exact forms compute the gradient
and the update of one process; they differ in bytes, messages and memory. The others (`Inexact`)
compute what `equivalence/reference_sync.py` defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from shardwise.dtypes import DTYPES, dtype_name
from shardwise.errors import PlanError
from shardwise.formatting import counted
from shardwise.inexact import Compression, Inexact, OuterOptimizer
from shardwise.ir import Graph, Parameter, TensorType
from shardwise.schema import OneOf, Range, Writer, check_fields
from shardwise.shares import Shares

KINDS = ("", "all_reduce", "sharded", "owner", "partitioned")
SPARSE = ("", "gather", "rows")
SENT_DTYPES = ("", *(d.name for d in DTYPES.values() if d.can_train))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """The synchronization of the parameters that match a glob.

    `kind` is "all_reduce" (every rank keeps the parameter and its optimizer state), "sharded" (as
    the field `zero` of the entry says), "owner" (the rank `owner` keeps the optimizer state, gets
    the summed gradient and sends out the new values) or "partitioned" (ranks own parts of it:
    ranges of elements, or of the indices of `dim`, in proportion to `owners`, one weight per rank).
    The default "" is "sharded" with a ZeRO level and "all_reduce" without. Ranks are counted along
    the mesh axes over which the gradient is summed. With `host`, owners keep stored values and
    optimizer state in host memory.

    Small gradients are summed in buckets of `bucket_mib` (0: the default), of at most `chunk`
    gradients (0: any number), in `dtype` ("": that of the plan's precision). `sparse` sends the
    rows of an embedding's gradient with their indices: "gather" to all ranks, "rows" to the owners
    of the rows. `factors` sends the two factors of a linear layer's weight gradient instead of
    their product, wherever they are smaller. `hierarchical` is the number of ranks of a node,
    inside of which gradients are summed first, and then across nodes.

    These forms are exact. `every`, `outer`, `fragments`, `overlap`, `stale` and `compression` are
    not: see `Inexact`.

    A later glob with a `kind` replaces an earlier `Sync`; one without changes single fields.
    """

    kind: Annotated[str, OneOf(KINDS, "kind of synchronization")] = ""
    bucket_mib: Annotated[float, Range(0)] = 0.0
    chunk: Annotated[int, Range(0)] = 0
    dtype: Annotated[str, OneOf(SENT_DTYPES, "dtype of sent gradients")] = ""
    owner: Annotated[int, Range(0)] | None = None
    owners: tuple[int, ...] = ()
    dim: Annotated[int, Range(0)] | None = None
    host: bool = False
    sparse: Annotated[str, OneOf(SPARSE)] = ""
    factors: bool = False
    hierarchical: Annotated[int, Range(0)] = 0
    every: int = 1
    outer: OuterOptimizer | None = None
    fragments: int = 1
    overlap: int = 0
    stale: int = 0
    compression: Compression | None = None

    def __post_init__(self) -> None:
        check_fields(self, PlanError, where="sync")
        if (self.kind == "owner") != (self.owner is not None):
            raise PlanError(
                f"sync kind {self.kind!r} with owner={self.owner}", hint='kind="owner", owner=0'
            )
        if (self.owners or self.dim is not None) and self.kind != "partitioned":
            raise PlanError(
                f"sync kind {self.kind!r} with owners={self.owners}, dim={self.dim}",
                hint='kind="partitioned", owners=(2, 1, 1)',
            )
        if self.owners:
            Shares(*self.owners)
        if self.host and self.kind not in ("owner", "partitioned"):
            raise PlanError(
                f"sync kind {self.kind!r} has no owner with host memory",
                hint='kind="owner", owner=0, host=True, or offload=("optimizer",) of the plan',
            )
        owned = self.kind == "owner" or (self.kind == "partitioned" and self.dim == 0)
        if self.sparse == "rows" and not owned:
            raise PlanError(
                'sync sparse="rows" sends gradients to the owners of rows, which must exist',
                hint='kind="partitioned", dim=0, sparse="rows", or sparse="gather"',
            )
        for name in ("factors", "hierarchical"):
            if getattr(self, name) and (self.sparse or self.has_owners):
                raise PlanError(
                    f"sync ({self}): {name} is a form of all-reduce",
                    hint=f'kind="all_reduce", {name}={getattr(self, name)}',
                )
        if self.sparse == "gather" and self.has_owners:
            raise PlanError(f"sync ({self}): rows go to their owners", hint='sparse="rows"')
        other = self.has_owners and self.inexact != Inexact(stale=self.stale)
        if self.inexact and (other or self.sparse or self.factors or self.hierarchical):
            raise PlanError(
                f"sync ({self}) of gradients that are not all-reduced",
                hint=f'kind="all_reduce" for {", ".join(self.inexact.words())}',
            )

    @property
    def inexact(self) -> Inexact:
        """The fields that differ from synchronous training; false if there are none."""
        return Inexact(**{f.name: getattr(self, f.name) for f in fields(Inexact)})

    @property
    def has_owners(self) -> bool:
        """Whether a rank, or several, update the parameter for all."""
        return self.kind in ("owner", "partitioned")

    def updated(self, later: Sync | None) -> Sync:
        """Return this synchronization as changed by a later glob.

        >>> print(Sync(kind="owner", owner=1).updated(Sync(dtype="bfloat16")))
        owner 1, sent in bfloat16
        """
        if later is None or later.kind:
            return later or self
        changed = {f.name: v for f in fields(later) if (v := getattr(later, f.name)) != f.default}
        try:
            return replace(self, **changed)
        except PlanError as error:
            raise PlanError(
                f"{error.message}; a later glob ({later}) changes single fields of ({self})",
                hint='kind="all_reduce" in the later one, to replace all fields',
            ) from None

    def weights(self, num_ranks: int) -> tuple[int, ...]:
        """Return the share of each of the ranks that own the parameter; () if shares are equal.

        >>> Sync(kind="owner", owner=1).weights(3), Sync(kind="partitioned").weights(3)
        ((0, 1, 0), ())
        """
        if self.kind == "owner":
            return tuple(int(rank == self.owner) for rank in range(num_ranks))
        return self.owners

    def check_ranks(self, num_ranks: int, where: str) -> None:
        """Raise `PlanError` if owners are not among the ranks that sum the gradient."""
        if self.owner is not None and self.owner >= num_ranks:
            raise PlanError(
                f"sync owner={self.owner}, but gradients are summed over "
                f"{counted(num_ranks, 'rank')}",
                where=where,
                hint=f"0 to {num_ranks - 1}",
            )
        if self.owners and len(self.owners) != num_ranks:
            raise PlanError(
                f"sync owners {Shares(*self.owners)} for {counted(len(self.owners), 'rank')}, but "
                f"gradients are summed over {num_ranks}",
                where=where,
                hint=f"owners={(1,) * num_ranks}, one weight per rank; 0 owns nothing",
            )
        if self.hierarchical and num_ranks % self.hierarchical:
            raise PlanError(
                f"sync hierarchical={self.hierarchical}, but gradients are summed over "
                f"{counted(num_ranks, 'rank')}",
                where=where,
                hint="the number of ranks of a node, of which there are several",
            )

    def to_json(self) -> dict[str, Any]:
        return Writer().fields(self)

    def __str__(self) -> str:
        return ", ".join(self._words()) or "by zero"

    def _words(self) -> Iterable[str]:
        if self.kind == "owner":
            yield f"owner {self.owner}"
        elif self.kind == "partitioned":
            shares = f" {Shares(*self.owners)}" if self.owners else ""
            yield f"partitioned{shares}" + ("" if self.dim is None else f" along dim {self.dim}")
        elif self.kind:
            yield self.kind.replace("_", "-")
        if self.host:
            yield "in host memory"
        if self.sparse:
            yield "sparse rows " + ("gathered" if self.sparse == "gather" else "to their owners")
        if self.factors:
            yield "factors instead of products"
        if self.hierarchical:
            yield f"nodes of {counted(self.hierarchical, 'rank')} first"
        if self.bucket_mib:
            yield f"buckets of {self.bucket_mib:g} MiB"
        if self.chunk:
            yield f"at most {counted(self.chunk, 'gradient')} at once"
        if self.dtype:
            yield f"sent in {self.dtype}"
        yield from self.inexact.words()


SPARSE_OPERATORS = frozenset({"aten.embedding.default", "aten.embedding_bag.padding_idx"})
FACTOR_OPERATORS = frozenset({"aten.linear.default"})
Uses = Mapping[str, frozenset[str]]  # the operators that use each value


def operator_uses(graph: Graph) -> Uses:
    """Return the operators that use each value of a graph."""
    uses: dict[str, set[str]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            uses.setdefault(name, set()).add(node.op)
    return {name: frozenset(operators) for name, operators in uses.items()}


def applied_sync(graph: Graph, parameter: Parameter, sync: Sync | None, uses: Uses) -> Sync:
    """Return the synchronization of one parameter, without fields that only suit others."""
    if sync is None or not _has_gradient(graph, parameter):
        return Sync()
    operators = uses.get(parameter.value, frozenset())
    dims = len(graph.values[parameter.value].shape)
    if sync.sparse and not _is_sparse(operators):
        sync = replace(sync, sparse="")
    if sync.factors and not _is_product(operators, dims):
        sync = replace(sync, factors=False)
    return replace(sync, dim=None) if (sync.dim or 0) >= max(1, dims) else sync


def check_parameter(
    graph: Graph, parameter: Parameter, sync: Sync, zero: int | None, uses: Uses
) -> None:
    """Raise `PlanError` unless a parameter can be synchronized like this."""
    kind, name = graph.values[parameter.value], parameter.name
    if not _has_gradient(graph, parameter):
        state = dtype_name(kind.dtype) if parameter.requires_grad else "frozen"
        raise PlanError(
            f"sync ({sync}) of a {state} parameter, which has no gradient",
            where=name,
            hint="a glob of trained parameters",
        )
    if sync.kind == "sharded" and not zero:
        raise PlanError("sync kind 'sharded' needs a ZeRO level", where=name, hint="zero=1, 2 or 3")
    forms = sync.sparse or sync.factors or sync.hierarchical
    if zero and (sync.kind in ("all_reduce", "owner", "partitioned") or forms):
        raise PlanError(
            f"zero={zero} shards what sync ({sync}) assigns otherwise",
            where=name,
            hint="zero=0 for this parameter, or no sync",
        )
    if sync.dim is not None and sync.dim >= len(kind.shape):
        raise PlanError(
            f"sync dim={sync.dim} of a parameter of shape {list(kind.shape)}",
            where=name,
            hint=f"dim=0 to {len(kind.shape) - 1}",
        )
    if sync.inexact:
        check_inexact(name, kind, sync, zero or 0)
    operators = uses.get(parameter.value, frozenset())
    if sync.sparse and not _is_sparse(operators):
        raise _unsuitable(name, "sparse", "only embeddings have sparse gradients", operators)
    if sync.factors and not _is_product(operators, len(kind.shape)):
        problem = "only the weight of a linear layer has a gradient that is a product"
        raise _unsuitable(name, "factors", problem, operators)


def _has_gradient(graph: Graph, parameter: Parameter) -> bool:
    dtype = graph.values[parameter.value].dtype
    return parameter.requires_grad and (dtype.is_floating_point or dtype.is_complex)


def _is_sparse(operators: frozenset[str]) -> bool:
    return bool(operators) and operators <= SPARSE_OPERATORS


def _is_product(operators: frozenset[str], dims: int) -> bool:
    return bool(operators) and operators <= FACTOR_OPERATORS and dims == 2


def check_inexact(name: str, kind: TensorType, sync: Sync, zero: int) -> None:
    """Raise `PlanError` where an inexact synchronization has no meaning."""
    highest = 0 if sync.every > 1 else 1
    if zero > highest:
        reason = "every rank updates its own replica" if sync.every > 1 else "each rank has a part"
        raise PlanError(
            f"sync ({sync}) with zero={zero}: {reason}",
            where=name,
            hint=" or ".join(f"zero={level}" for level in range(highest + 1)),
        )
    if sync.compression is not None and kind.dtype.is_complex:
        raise PlanError(
            f"sync ({sync}) of a {dtype_name(kind.dtype)} parameter",
            where=name,
            hint="no compression for complex parameters",
        )


def _unsuitable(name: str, field: str, problem: str, operators: Iterable[str]) -> PlanError:
    used = ", ".join(sorted(operators)) or "no operator"
    return PlanError(
        f"sync {field}: {problem}; this parameter is used by {used}",
        where=name,
        hint=f"a glob of suitable parameters, or no {field!r} for this one",
    )
