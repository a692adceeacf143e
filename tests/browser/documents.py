"""Reports made by hand: what the page must be able to show, without planning anything.

Enters: sizes. Leaves: the JSON of a report in the form of `shardwise.report`.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedules import make

Json = dict[str, Any]
GIB = 2**30
KINDS = ["forward", "backward", "weight", "sync", "gather", "send", "optimizer"]
PASS = {"F": 0, "B": 1, "I": 1, "W": 2}
HOSTILE = {
    "tag": "<script>window.hacked = 1</script>",
    "close": "</script><img src=x onerror='window.hacked = 2'>",
    "quotes": "\"'`${window.hacked=3}`--><!--",
    "turned": "safe\u202egnp.exe\u2066 \u05d0\u05d1\u05d2",
    "long": "x" * 10_240,
}


def report(
    *,
    layers: int = 4,
    operations: int = 6,
    classes: int = 4,
    ranks: int = 8,
    microbatches: int = 8,
    spans: int = 0,
    lines: int = 120,
    measured: bool = False,
) -> Json:
    """A report of a model of `layers` equal layers, each with so many `operations`."""
    rows = timeline(classes, ranks, microbatches, spans)
    step = rows["step_time_s"]
    return {
        "format": "shardwise-report",
        "version": 1,
        "title": f"GPT on h100-{ranks}, {ranks} ranks",
        "verdict": verdict(ranks, step, measured),
        "missing": {} if measured else {"measured": MISSING},
        "causes": causes(step),
        "modules": modules(layers, operations),
        "groups": [group(i, ranks, classes) for i in range(classes)],
        "classes": [
            {"id": i, "label": label(i, ranks, classes), "groups": [i], "num_ranks": ranks}
            for i in range(classes)
        ],
        "cluster": cluster(ranks, classes),
        "memory": [memory(i, ranks, classes, step) for i in range(classes)],
        "timeline": rows,
        "schedule": schedule(classes, ranks, microbatches),
        "plans": plans(step),
        "gap": {"layouts": 0.012, "search": 0.0, "points": 468, "simulated": 64},
        "what_if": what_if(step),
        "code": code(lines),
        "collectives": None,
        "measured": recorded(rows, step) if measured else None,
    }


MISSING = "No recorded run was given. shardwise report plan.json --trace run.json -o report.html"


def hostile() -> Json:
    """Names that would be markup, end a string, turn the text around, or never end."""
    made = report(measured=True)
    names = list(HOSTILE.values())
    made["title"] = made["verdict"]["model"] = " ".join(names[:4])
    made["verdict"] |= {"plan": names[1], "cluster": names[2], "notes": names}
    made["verdict"]["limit"]["text"] = names[0]
    made["missing"] = dict.fromkeys(("code", "plans"), " ".join(names))
    made["plans"] = None
    for row, name in zip(made["modules"]["rows"], names, strict=False):
        row |= {"name": name, "path": name, "kind": name, "layout": name}
    for i, parameter in enumerate(made["modules"]["parameters"]):
        parameter |= {"name": names[i % 5], "layout": names[i % 5], "dtype": names[1]}
    for column in ("name", "op", "layout"):
        count = len(made["modules"]["nodes"]["module"])
        made["modules"]["nodes"][column] = [names[i % 5] for i in range(count)]
    for part in (made["modules"]["sources"], made["code"]["sources"]):
        for i, source in enumerate(part):
            source |= {"file": names[i % 5], "text": names[(i + 1) % 5]}
    made["code"]["files"][0] |= {"name": names[1]}
    made["code"]["files"][0]["lines"][:5] = names
    for i, node in enumerate(made["cluster"]["nodes"]):
        node |= {"name": names[i % 5], "kind": names[0]}
    for i, link in enumerate(made["cluster"]["links"]):
        link |= {"name": names[i % 5], "what": {names[0]: 1.0}}
    made["timeline"]["names"] = [names[i % 5] for i in range(len(made["timeline"]["names"]))]
    for place in ("timeline", "schedule"):
        for i, row in enumerate(made[place]["rows"]):
            row["label"] = names[i % 5]
    for i, each in enumerate(made["classes"]):
        each["label"] = names[i % 5]
    for what in made["what_if"]:
        what |= {"change": names[0], "note": names[3]}
    made["measured"]["file"] = names[1]
    for found in made["measured"]["disagreements"]:
        found |= {"cause": names[0], "where": names[1], "text": names[2], "advice": names[3]}
    return made


def sparse() -> Json:
    """A plan that does not fit, of which little more than the verdict is known."""
    made = report(classes=1, ranks=1, microbatches=1)
    for key in ("modules", "cluster", "schedule", "plans", "gap", "what_if", "code", "price"):
        made[key] = None
    made["missing"] = {}
    made["verdict"] |= {"tokens_per_s": None, "fits": False, "price": None, "notes": []}
    made["verdict"]["memory"] |= {"peak_bytes": 90 * GIB, "free_bytes": -16 * GIB}
    made["memory"][0] |= {"peak_bytes": 90 * GIB, "over_time": [], "times": [], "others": {}}
    row = made["timeline"]["rows"][0]
    row["lanes"] = {"compute": {key: [] for key in ("start", "end", "kind", "name", "critical")}}
    made["timeline"] |= {"critical": None, "folded": "of 4,096 micro-batches, the first 64"}
    return made


def large() -> Json:
    """1,024 ranks, 10,000 operations and 100,000 spans."""
    return report(
        layers=100,
        operations=100,
        classes=32,
        ranks=1024,
        microbatches=128,
        spans=100_000,
        lines=15_000,
    )


def label(i: int, ranks: int, classes: int) -> str:
    many = ranks // classes
    return f"ranks {i * many}-{(i + 1) * many - 1}"


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
    against = {"step_time_s": step * 1.07, "difference": 0.07, "text": "slower than predicted"}
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
        "notes": ["times of kernels are modelled: no measurement of this device was found"],
        "measured": against if measured else None,
    }


def causes(step: float) -> list[Json]:
    shares = {
        "compute": ("computing", 0.46),
        "recompute": ("computing activations again", 0.06),
        "collectives": ("collectives of layers", 0.08),
        "parameters": ("gathering parameters", 0.02),
        "bubble": ("waiting for other stages", 0.31),
        "gradients": ("summing gradients", 0.04),
        "optimizer": ("optimizer", 0.03),
    }
    return [
        {"name": name, "text": text, "seconds": share * step, "share": share}
        for name, (text, share) in shares.items()
    ]


def modules(layers: int, operations: int) -> Json:
    """A model of an embedding, layers in two distinct halves of distinct blocks, and a head."""
    rows: list[Json] = []
    parameters: list[Json] = []
    nodes: Json = {
        key: []
        for key in (
            "module", "name", "op", "layout", "forward_s", "backward_s", "communication_s",
            "bytes", "source",
        )
    }  # fmt: skip
    sources = [
        {"file": "model.py", "line": 10 + i, "text": f"x = self.part_{i}(x)"} for i in range(40)
    ]

    def add(parent: int | None, name: str, kind: str, size: float) -> int:
        rows.append(
            {
                "id": len(rows),
                "parent": parent,
                "name": name,
                "path": name if parent is None else f"{rows[parent]['path']}.{name}",
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
                "layout": "tp: cut out" if size < layers else "",
            }
        )
        return len(rows) - 1

    root = add(None, "GPT", "GPT", 2 + layers)
    for name in ("embedding", *(f"layers.{i}" for i in range(layers)), "head"):
        made = add(root, name, "Linear" if "." not in name else "Block", 1)
        leaves = [made]
        if "." in name:
            leaves = [add(made, "attention", "Attention", 0.4), add(made, "mlp", "MLP", 0.6)]
        for leaf in leaves:
            parameters.append(
                {
                    "module": leaf,
                    "name": "weight",
                    "path": f"{rows[leaf]['path']}.weight",
                    "shape": [4096, 4096],
                    "dtype": "bfloat16",
                    "layout": "tp: cut dim 0",
                    "zero": 1,
                    "bytes": 2 * 4096**2,
                    "local_bytes": 4096**2,
                }
            )
            for i in range(operations // len(leaves)):
                nodes["module"].append(leaf)
                nodes["name"].append(f"linear_{len(nodes['name'])}")
                nodes["op"].append("aten.linear" if i % 2 else "aten.add.Tensor")
                nodes["layout"].append("tp: cut n")
                nodes["forward_s"].append(1e-5)
                nodes["backward_s"].append(2e-5)
                nodes["communication_s"].append(0.0)
                nodes["bytes"].append(2**20)
                nodes["source"].append(i % len(sources))
    return {"rows": rows, "parameters": parameters, "nodes": nodes, "sources": sources}


def cluster(ranks: int, classes: int) -> Json:
    many = max(1, ranks // 8)
    shown = min(many, 4)
    nodes = [
        {
            "name": f"node-{n}",
            "copies": many // shown,
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
        "count": many,
        "busiest": "node-0 to node-1",
        "bytes_per_s": 5e10,
        "traffic_bytes": 2.1e9,
        "total_bytes": 8e9,
        "busy_s": 0.034,
        "share": 0.43,
        "what": {"send": 1.4e9, "gradients": 0.7e9},
    }
    return {"name": f"h100-{ranks}", "nodes": nodes, "links": [*inside, between]}


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


def played(classes: int, microbatches: int) -> tuple[list[list[tuple[str, float, float]]], float]:
    """Actions of a zero-bubble schedule, each a unit long, in the order of what they wait for."""
    made = make("zb_h1" if classes <= 8 else "1f1b", groups=classes, microbatches=microbatches)
    unit = 1e-3
    done: dict[tuple[str, int, int], float] = {}
    lists = [list(actions) for actions in made.actions]
    found: list[list[tuple[str, float, float]]] = [[] for _ in lists]
    free = [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for g, actions in enumerate(lists):
            while len(found[g]) < len(actions):
                action = actions[len(found[g])]
                s, m = action.stage, action.microbatch
                wait = {"F": ("F", s - 1, m) if s else None, "W": ("B", s, m)}.get(
                    action.kind, ("B", s + 1, m) if s + 1 < classes else ("F", s, m)
                )
                if wait is not None and wait not in done:
                    break
                start = max(free[g], done[wait] if wait else 0.0)
                end = start + unit * {"F": 1.0, "B": 2.0}.get(action.kind, 1.0)
                done["B" if action.kind in "BI" else action.kind, s, m] = free[g] = end
                found[g].append((str(action), start, end))
                moved = True
    return found, max(free)


def timeline(classes: int, ranks: int, microbatches: int, spans: int) -> Json:
    actions, ends = played(classes, microbatches)
    step = ends * 1.06
    names: list[str] = []
    index: dict[str, int] = {}

    def number(name: str) -> int:
        if name not in index:
            index[name] = len(names)
            names.append(name)
        return index[name]

    rows = []
    for g, mine in enumerate(actions):
        compute: Json = {key: [] for key in ("start", "end", "kind", "name", "critical")}
        communication: Json = {key: [] for key in ("start", "end", "kind", "name", "critical")}
        for name, start, end in mine:
            kind = next(PASS[c] for c in name if c in PASS)
            parts = max(1, spans // (2 * sum(map(len, actions))))
            for k in range(parts):
                wide = (end - start) / parts
                compute["start"].append(start + k * wide)
                compute["end"].append(start + (k + 0.9) * wide)
                compute["kind"].append(kind)
                compute["name"].append(number(name))
                compute["critical"].append(int(g == classes - 1 or start < 1e-3 * g))
                communication["start"].append(start + (k + 0.7) * wide)
                communication["end"].append(start + (k + 1.0) * wide)
                communication["kind"].append(5 if kind == 0 else 4)
                communication["name"].append(number(f"send {name}"))
                communication["critical"].append(0)
        for lane, kind, name in ((communication, 3, "gradients"), (compute, 6, "optimizer")):
            lane["start"].append(ends)
            lane["end"].append(step)
            lane["kind"].append(kind)
            lane["name"].append(number(name))
            lane["critical"].append(int(kind == 6))
        busy = sum(e - s for s, e in zip(compute["start"], compute["end"], strict=True))
        rows.append(
            {
                "class": g,
                "group": g,
                "label": label(g, ranks, classes),
                "lanes": {"compute": compute, "communication": communication},
                "busy_s": busy,
                "idle_s": step - busy,
                "exposed_s": 0.02 * step,
            }
        )
    return {
        "step_time_s": step,
        "kinds": KINDS,
        "names": names,
        "rows": rows,
        "critical": {
            "text": "through the forwards of all stages, then the last stage.",
            "seconds": {"compute": 0.8 * step, "communication": 0.1 * step, "waiting": 0.1 * step},
        },
        "folded": None,
    }


def schedule(classes: int, ranks: int, microbatches: int) -> Json:
    actions, _ = played(classes, microbatches)
    rows = []
    for g, mine in enumerate(actions):
        letters = [next(c for c in name if c in PASS) for name, _, _ in mine]
        rows.append(
            {
                "label": label(g, ranks, classes),
                "start": [s for _, s, _ in mine],
                "end": [e for _, _, e in mine],
                "kind": letters,
                "stage": [g] * len(mine),
                "microbatch": [int(n.split(c)[1]) for (n, _, _), c in zip(mine, letters)],  # noqa: B905
            }
        )
    return {
        "name": "zb_h1",
        "stages": classes,
        "microbatches": microbatches,
        "bubble_fraction": 0.31,
        "rows": rows,
    }


def plans(step: float) -> list[Json]:
    base = {c["name"]: c["seconds"] for c in causes(step)}
    found = [
        {
            "what": "dp=1, tp=2, pp=4, zb_h1",
            "chosen": True,
            "step_time_s": step,
            "ratio": 1.0,
            "causes": base,
            "peak_bytes": 61.4 * GIB,
            "limit_bytes": 74 * GIB,
            "changed": {},
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
        found.append(
            {
                "what": what,
                "chosen": False,
                "step_time_s": total,
                "ratio": total / step,
                "causes": other,
                "peak_bytes": (70 - 10 * i) * GIB,
                "limit_bytes": 74 * GIB,
                "changed": {"tp": [2, 4 + i], "schedule": ["zb_h1", None]},
                "differences_s": {k: other[k] - base[k] for k in base},
                "memory_difference_bytes": (8.6 - 10 * i) * GIB,
                "text": "collectives take longer than the bubble that it saves",
            }
        )
    return found


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
        line("memory", "half the memory", 0.5, None, "needs 41.0 GiB, 37.0 GiB are there"),
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


def recorded(rows: Json, step: float) -> Json:
    """A run that takes 1.07 times as long, with sums of gradients that take thrice as long."""

    def stretched(lane: Json) -> Json:
        return lane | {key: [t * 1.07 for t in lane[key]] for key in ("start", "end")}

    timeline = rows | {
        "step_time_s": step * 1.07,
        "rows": [
            row | {"lanes": {k: stretched(lane) for k, lane in row["lanes"].items()}}
            for row in rows["rows"]
        ],
    }
    pairs = [("compute", "computing", 0.46, 0.48), ("gradients", "summing gradients", 0.04, 0.09)]
    return {
        "file": "run.json",
        "steps": 3,
        "step_time_s": step * 1.07,
        "predicted_step_time_s": step,
        "ratio": 1.07,
        "ranks": 8,
        "aggregated": None,
        "slowest": 3,
        "timeline": timeline,
        "causes": [
            {
                "name": name,
                "text": text,
                "predicted_s": a * step,
                "measured_s": b * step,
                "difference_s": (b - a) * step,
                "share_of_step": b,
            }
            for name, text, a, b in pairs
        ],
        "disagreements": [
            {
                "cause": "gradients",
                "where": "ranks 0-1, stage 0",
                "predicted_s": 0.04 * step,
                "measured_s": 0.09 * step,
                "difference_s": 0.05 * step,
                "share": 0.05,
                "text": "summing gradients took 2.3 times what was predicted",
                "advice": "shardwise profile measures the links of this machine",
            },
            {
                "cause": "compute",
                "where": "ranks 6-7, stage 3",
                "predicted_s": 0.46 * step,
                "measured_s": 0.45 * step,
                "difference_s": -0.01 * step,
                "share": 0.01,
                "text": "computing was a little faster than predicted",
                "advice": "",
            },
        ],
    }
