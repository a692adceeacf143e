"""Plan for two unequal nodes, and print the plan and the commands that start each node.

python examples/09_two_nodes.py
shardwise launch --cluster examples/two_nodes.yaml --plan plan.json --dry-run -- train.py

This does not need the nodes. Without `--dry-run`, `shardwise launch` checks and starts them.
"""

from __future__ import annotations

from pathlib import Path

import small_gpt
import torch

import shardwise as sw
from shardwise.launch import launch_commands
from shardwise.plans import used_devices


def main() -> None:
    """Load the cluster, and print a plan, an estimate and the commands."""
    cluster = sw.Cluster.load(Path(__file__).with_name("two_nodes.yaml"))
    print(cluster)

    with torch.device("meta"):  # shapes are enough for a plan
        model = small_gpt.SmallGPT(vocab=32000, width=2048, heads=16, layers=12).bfloat16()
        ids = torch.empty(240, 64, dtype=torch.long)
    graph = sw.capture(model, {"ids": ids, "labels": ids})
    plan = sw.plan(graph, cluster, precision="bf16")
    best = plan.search.best
    print(f"\n{best.what}: {best.step_time_s * 1e3:.0f} ms")
    for stage in plan.all_stages:
        print(f"  ranks {stage.ranks} from {stage.first or 'the first node'}")
    if left_out := plan.search.left_out:
        slower = (left_out.step_time_s or 0.0) * 1e3
        print(f"  {left_out.devices} left idle: with all devices {slower:.0f} ms")
    print("instead of")
    for other in plan.search.runners_up[:3]:
        print(f"  {other.what}: {other.step_time_s * 1e3:.0f} ms")
    print(f"limited by {plan.search.binding.text}")
    plan.save("plan.json")

    even = sw.strategies.fsdp(graph, cluster, precision="bf16")
    estimate = sw.simulate(graph, even, cluster)
    print(f"fsdp with even shares: {estimate.step_time_s * 1e3:.0f} ms")

    for command in launch_commands(
        used_devices(plan, cluster), ["train.py", "--plan", "plan.json"]
    ):
        print(f"\n# {command.node}\n{command}")


if __name__ == "__main__":
    main()
