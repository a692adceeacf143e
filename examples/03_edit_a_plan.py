"""Edit a plan, which is a JSON file, by hand and verify the result.

python examples/03_edit_a_plan.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import small_gpt

import shardwise as sw


def edit(path: Path, change: dict[str, dict[str, object]]) -> None:
    """Add entries to the fields of a plan file; later entries take precedence."""
    data = json.loads(path.read_text())
    for field, entries in change.items():
        data[field] |= entries
    path.write_text(json.dumps(data, indent=2))


def main() -> None:
    """Save, edit, load and verify a plan."""
    model, batch = small_gpt.make()
    graph = sw.capture(model, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2).save(path)

        # Replicate the positions on every rank, and shard the embedding's optimizer state over dp.
        edit(path, {"parameters": {"positions.*": {"layout": {"tp": "replicate"}}}})
        edit(path, {"parameters": {"tokens.weight": {"layout": {"tp": "0"}, "zero": 1}}})
        plan = sw.Plan.load(path)
        print(plan)
        print(sw.verify(model, batch, plan))

        # Shard the `down` layer of the second block over its outputs instead of its inputs.
        print(sw.explain(graph, plan, node="linear_7"))
        edit(path, {"parameters": {"blocks.1.down.*": {"layout": {"tp": "0"}}}})
        edit(path, {"nodes": {"linear_7": {"tp": "shard n"}}})
        print(sw.verify(model, batch, sw.Plan.load(path)))

        # A mistake raises an error with its place.
        edit(path, {"parameters": {"blocks.*.attn.qvk.weight": {"layout": {"tp": "replicate"}}}})
        try:
            sw.verify(model, batch, sw.Plan.load(path))
        except sw.errors.PlanError as error:
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
