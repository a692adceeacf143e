"""A plan as a table for people.

Enters: a `Plan`. Leaves: text of at most 100 columns.
"""

from __future__ import annotations

from shardwise.plans.plan import Plan

ZERO = {
    None: "",
    0: "all-reduce",
    1: "zero 1: optimizer state sharded",
    2: "zero 2: and gradients",
    3: "zero 3: and parameters",
}


def format_plan(plan: Plan) -> str:
    """The mesh, what each axis cuts, and every parameter entry."""
    lines = [f"Plan {plan.name} for {plan.model} on {plan.mesh}"]
    for axis, role in plan.roles.items():
        dims = sorted({d for d in plan.inputs.values() if d is not None})
        what = f"the batch (input dim {', '.join(map(str, dims)) or 'free'})"
        lines.append(f"  {axis:<4} cuts {what if role == 'batch' else 'parameters'}")
    rows = []
    for glob, entry in plan.parameters.items():
        cut = ", ".join(f"{axis}: {text}" for axis, text in entry.layout.items()) or "whole"
        shared = entry.zero or "batch" in plan.roles.values()
        rows.append((glob, cut, ZERO[entry.zero] if shared else ""))
    rows.insert(0, ("parameter", "cut", "gradients and state" if any(r[2] for r in rows) else ""))
    widths = [min(48, max(len(row[i]) for row in rows)) for i in range(2)]
    for row in rows:
        lines.append(f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip())
    for node, choices in plan.nodes.items():
        lines.append(f"  node {node}: {', '.join(f'{a}: {c}' for a, c in choices.items())}")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines)
