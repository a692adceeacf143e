"""Parameters, cuts and number types as source text, for the tables at the head of a file."""

from __future__ import annotations

from shardwise.dtypes import dtype_name
from shardwise.emit.quote import literal
from shardwise.plans import Plan
from shardwise.program import Storage
from shardwise.sharding.placements import Layout


def splits_text(layout: Layout) -> str:
    """Return the cuts of a layout as a tuple of `rt.Split`."""
    cuts = [
        f"rt.Split(axis={literal(axis)}, dim={literal(shard.dim)}, of={literal(shard.of)})"
        for axis, shard in layout.shards
    ]
    return f"({', '.join(cuts)}{',' if len(cuts) == 1 else ''})"


def _number_types(storage: Storage, plan: Plan) -> list[str]:
    """Return the types in which a parameter is stored, its gradient added up, and summed over
    ranks.
    """
    if not storage.dtype.is_floating_point:
        return []
    precision, last, fields = plan.precision, dtype_name(storage.dtype), []
    for name, dtype in (
        ("master", precision.master),
        ("gradient", precision.gradients),
        ("reduce", precision.reduce),
    ):
        if dtype and dtype != last:
            fields.append(f"{name}={literal(dtype)}")
        last = dtype or last
    return fields


def parameter_spec(storage: Storage, plan: Plan) -> str:
    """Return a parameter as `rt.ParameterSpec(…)`."""
    fields = [f"name={literal(storage.name)}", f"shape={literal(storage.shape)}"]
    fields.append(f'dtype="{dtype_name(storage.dtype)}"')
    if storage.aliases:
        fields.append(f"aliases={literal(storage.aliases)}")
    if storage.layout.shards:
        fields.append(f"splits={splits_text(storage.layout)}")
    if storage.sync:
        fields += [f"sync={literal(storage.sync)}", f"zero={literal(storage.zero)}"]
    if storage.unit:
        fields.append(f"unit={literal(storage.unit)}")
    if not storage.requires_grad:
        fields.append("requires_grad=False")
    fields += _number_types(storage, plan)
    kept = tuple(what for what in plan.offload if what != "activations")
    if kept and not storage.borrowed:
        fields.append(f"offload={literal(kept)}")
    if storage.borrowed:
        fields.append("borrowed=True")
    return f"rt.ParameterSpec({', '.join(fields)})"
