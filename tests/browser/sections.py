"""Build the JSON of the sections of a report, in the form of `shardwise.reports.document`."""

from __future__ import annotations

from typing import Any

from tests.browser.timelines import label

Json = dict[str, Any]
GIB = 2**30


def group(i: int, ranks: int, classes: int) -> Json:
    text = label(i, ranks, classes)[6:]
    return {
        "id": i,
        "ranks": text,
        "num_ranks": ranks // classes,
        "stages": [i],
        "mesh": "dp=1, tp=2",
        "class": i,
    }


def verdict(ranks: int, step: float, measured: bool) -> Json:
    text = "waiting for other stages: 31% of the step"
    comparison = {"step_time_s": step * 1.07, "difference": 0.07, "text": "slower than predicted"}
    return {
        "model": "GPT",
        "plan_name": "auto",
        "plan": "dp=1, tp=2, pp=4, zb_h1",
        "cluster": f"h100-{ranks}",
        "num_ranks": ranks,
        "step_time_s": step,
        "rows_per_s": 64 / step,
        "tokens_per_s": 64 * 2048 / step,
        "fits": True,
        "memory": {
            "group": 0,
            "peak_bytes": 61.4 * GIB,
            "limit_bytes": 74 * GIB,
            "free_bytes": 12.6 * GIB,
        },
        "limit": {"what": "bubble", "text": text},
        "price": {"per_hour": 55.2, "per_million_rows": 3.25},
        "notes": ["times of kernels are modelled, because this device was not measured"],
        "measured": comparison if measured else None,
    }


def causes(step: float) -> list[Json]:
    shares = {
        "compute": ("computing", 0.46),
        "recompute": ("recomputing activations", 0.06),
        "collectives": ("collectives of layers", 0.08),
        "parameters": ("gathering parameters", 0.02),
        "bubble": ("waiting for other stages", 0.31),
        "gradients": ("reducing gradients", 0.04),
        "optimizer": ("optimizer", 0.03),
    }
    return [
        {"name": name, "text": text, "seconds": share * step, "share": share}
        for name, (text, share) in shares.items()
    ]


def modules(layers: int, operations: int) -> Json:
    """Return a model of an embedding, layers of an attention and an MLP, and a head."""
    rows: list[Json] = []
    sources = [
        {"file": "model.py", "line": 10 + i, "text": f"x = self.part_{i}(x)"} for i in range(40)
    ]

    def add(parent: int | None, name: str, kind: str, size: float) -> int:
        path = name if parent is None else f"{rows[parent]['path']}.{name}"
        row = _module(len(rows), parent, kind, size)
        layout = "tp: shard out" if size < layers else ""
        rows.append({**row, "name": name, "path": path, "layout": layout})
        return len(rows) - 1

    root = add(None, "GPT", "GPT", 2 + layers)
    leaves: list[tuple[int, int]] = []  # modules with parameters, and their operations
    for name in ("embedding", *(f"layers.{i}" for i in range(layers)), "head"):
        if "." in name:
            block = add(root, name, "Block", 1)
            children = [add(block, "attention", "Attention", 0.4), add(block, "mlp", "MLP", 0.6)]
            leaves += [(child, operations // 2) for child in children]
        else:
            leaves.append((add(root, name, "Linear", 1), operations))
    return {
        "rows": rows,
        "parameters": [_weight(leaf, rows[leaf]["path"]) for leaf, _ in leaves],
        "nodes": _operations(leaves, len(sources)),
        "sources": sources,
    }


def _module(number: int, parent: int | None, kind: str, size: float) -> Json:
    return {
        "id": number,
        "parent": parent,
        "kind": kind,
        "count": 1,
        "stages": [0] if parent else [0, 1, 2, 3],
        "forward_s": 1e-3 * size,
        "backward_s": 2e-3 * size,
        "communication_s": 4e-4 * size,
        "sync_s": 0.0,
        "parameters": int(1e6 * size),
        "parameter_bytes": 2e6 * size,
        "activation_bytes": 5e6 * size,
    }


def _weight(module: int, path: str) -> Json:
    return {
        "module": module,
        "name": "weight",
        "path": f"{path}.weight",
        "shape": [4096, 4096],
        "dtype": "bfloat16",
        "layout": "tp: shard dim 0",
        "zero": 1,
        "bytes": 2 * 4096**2,
        "local_bytes": 4096**2,
    }


def _operations(leaves: list[tuple[int, int]], sources: int) -> Json:
    """Return columns of operations for pairs of modules and their numbers of operations."""
    rows = [(leaf, i) for leaf, count in leaves for i in range(count)]
    return {
        "module": [leaf for leaf, _ in rows],
        "name": [f"linear_{at}" for at in range(len(rows))],
        "op": ["aten.linear" if i % 2 else "aten.add.Tensor" for _, i in rows],
        "layout": ["tp: shard n"] * len(rows),
        "forward_s": [1e-5] * len(rows),
        "backward_s": [2e-5] * len(rows),
        "communication_s": [0.0] * len(rows),
        "bytes": [2**20] * len(rows),
        "source": [i % sources for _, i in rows],
    }


def cluster(ranks: int, classes: int) -> Json:
    count = max(1, ranks // 8)
    shown = min(count, 4)
    nodes = [
        {
            "name": f"node-{n}",
            "copies": count // shown,
            "kind": "h100",
            "first": n,
            "devices": [
                {
                    "name": "h100",
                    "kind": "cuda",
                    "memory_bytes": 80 * GIB,
                    "ranks": str(n * 8 + d),
                    "group": (n * 8 + d) * classes // max(ranks, shown * 8) % classes,
                    "peak_bytes": (60 - 4 * d) * GIB,
                }
                for d in range(min(8, ranks))
            ],
        }
        for n in range(shown)
    ]
    inside = [
        {
            "name": f"nvlink of node-{n}",
            "kind": "inside",
            "nodes": [f"node-{n}"],
            "count": 1,
            "bytes_per_s": 4.5e11,
            "traffic_bytes": 3.2e9,
            "total_bytes": 3.2e9,
            "busy_s": 0.011,
            "share": 0.14,
            "what": {"collectives": 3e9, "gradients": 2e8},
        }
        for n in range(shown)
    ]
    between = {
        "name": "infiniband",
        "kind": "between",
        "nodes": [n["name"] for n in nodes],
        "count": count,
        "busiest": "node-0 to node-1",
        "bytes_per_s": 5e10,
        "traffic_bytes": 2.1e9,
        "total_bytes": 8e9,
        "busy_s": 0.034,
        "share": 0.43,
        "what": {"send": 1.4e9, "gradients": 0.7e9},
    }
    return {"name": f"h100-{ranks}", "nodes": nodes, "links": [*inside, between]}


def collectives() -> list[Json]:
    """Return implementations other than the library; the last one has no predicted times."""
    rows = []
    for uses, count, saved in (("solved", 1, 0.25), ("shared", 64, 0.6), ("hierarchical", 1, 0)):
        rows.append(
            {
                "operation": "all_reduce",
                "groups": "0-7" if count == 1 else f"0-1 | 2-3 | 4-5 | 6-7 | … {count - 4} more",
                "num_groups": count,
                "group_ranks": 8 if count == 1 else 2,
                "uses": uses,
                "implementation": f"{uses} from 64 KiB on",
                "min_bytes": 1 << 16,
                "reference_bytes": 16 << 20,
                "predicted_s": {"library": 4e-3, uses: 4e-3 * (1 - saved)} if saved else {},
                "saved_share": saved,
            }
        )
    return rows


def memory(i: int, ranks: int, classes: int, step: float) -> Json:
    peak = (61.4 - 20 * i / classes) * GIB
    steps = 40
    shape = [0.4 + 0.6 * min(k, steps - k) / (steps / 2) for k in range(steps)]
    parts = {"parameters": 0.2, "gradients": 0.15, "optimizer": 0.3, "activations": 0.25}
    return {
        "group": i,
        "ranks": label(i, ranks, classes)[6:],
        "peak_bytes": peak,
        "limit_bytes": 74 * GIB,
        "when": f"{i}I0",
        "parts": {name: share * peak for name, share in parts.items()} | {"temporary": 0.06 * peak},
        "others": {"process": 0.04 * peak},
        "host_bytes": 0,
        "over_time": [peak * s for s in shape],
        "times": [step * k / steps for k in range(steps)],
    }


def plans(step: float) -> list[Json]:
    base = {c["name"]: c["seconds"] for c in causes(step)}
    rows = [
        {
            "what": "dp=1, tp=2, pp=4, zb_h1",
            "chosen": True,
            "step_time_s": step,
            "ratio": 1.0,
            "causes": base,
            "peak_bytes": 61.4 * GIB,
            "limit_bytes": 74 * GIB,
            "changed": {},
            "words": {},
            "differences_s": {},
            "memory_difference_bytes": 0,
            "text": "",
        }
    ]
    for i, what in enumerate(("dp=2, tp=4, pp=1", "dp=8, zero 3", "dp=1, tp=8, pp=1")):
        other = base | {
            "collectives": base["collectives"] * (2 + i),
            "bubble": base["bubble"] * (0.9 - 0.2 * i),
        }
        total = sum(other.values())
        rows.append(
            {
                "what": what,
                "chosen": False,
                "step_time_s": total,
                "ratio": total / step,
                "causes": other,
                "peak_bytes": (70 - 10 * i) * GIB,
                "limit_bytes": 74 * GIB,
                "changed": {"tp": [2, 4 + i], "schedule": ["zb_h1", None]},
                "words": {
                    "tp": ["tp=2", f"tp={4 + i}"],
                    "schedule": ["schedule zb_h1", "schedule none"],
                },
                "differences_s": {k: other[k] - base[k] for k in base},
                "memory_difference_bytes": (8.6 - 10 * i) * GIB,
                "text": "its collectives cost more than the bubble that it saves",
            }
        )
    return rows


def what_if(step: float) -> list[Json]:
    def line(kind: str, change: str, value: float, ratio: float | None, note: str = "") -> Json:
        return {
            "kind": kind,
            "change": change,
            "value": value,
            "step_time_s": None if ratio is None else step * ratio,
            "ratio": ratio,
            "feasible": ratio is not None,
            "note": note,
        }

    return [
        line("memory", "half the memory", 0.5, None, "needs 41.0 GiB, 37.0 GiB are available"),
        line("memory", "twice the memory", 2, 0.93, "no recomputation"),
        line("bandwidth", "links half as fast", 0.5, 1.21),
        line("bandwidth", "links twice as fast", 2, 0.91),
        line("devices", "half as many devices", 0.5, 1.88),
        line("devices", "twice as many devices", 2, 0.56, "dp=2 instead of dp=1"),
        line("compute", "devices twice as fast", 2, 0.62),
    ]


def code(lines: int) -> Json:
    sources = [
        {"file": "model.py", "line": 10 + 3 * i, "text": f"    x = self.part_{i}(x)  # layer {i}"}
        for i in range(40)
    ]
    text = ['"""What rank 0 computes.', "", 'Two lines."""', "import torch", ""]
    links = [-1] * len(text)
    for i in range(lines):
        source = sources[i % len(sources)]
        text.append(f'    v{i} = F.linear(v{i - 1}, p["layers.{i}.weight"])  # {source["text"]}')
        links.append(i % len(sources))
    files = [
        {"name": f"rank_{r}.py", "ranks": f"{r}", "lines": text, "sources": links} for r in (0, 1)
    ]
    files[1]["lines"] = text[:20]
    files[1]["sources"] = links[:20]
    return {"files": files, "sources": sources}
