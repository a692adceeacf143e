"""Build the JSON of timelines: predicted, as a schedule, and recorded."""

from __future__ import annotations

from typing import Any

from shardwise.schedules import make

Json = dict[str, Any]
KINDS = ["forward", "backward", "weight", "sync", "gather", "send", "optimizer"]
PASS = {"F": 0, "B": 1, "I": 1, "W": 2}


def label(i: int, ranks: int, classes: int) -> str:
    size = ranks // classes
    return f"ranks {i * size}-{(i + 1) * size - 1}"


def simulated(
    classes: int, num_microbatches: int
) -> tuple[list[list[tuple[str, float, float]]], float]:
    """Return the actions of a schedule with their times, and the end of the last one."""
    schedule = make(
        "zb_h1" if classes <= 8 else "1f1b", num_groups=classes, num_microbatches=num_microbatches
    )
    unit = 1e-3
    done: dict[tuple[str, int, int], float] = {}
    lists = [list(actions) for actions in schedule.actions]
    times: list[list[tuple[str, float, float]]] = [[] for _ in lists]
    free = [0.0] * len(lists)
    progresses = True
    while progresses:
        progresses = False
        for g, actions in enumerate(lists):
            while len(times[g]) < len(actions):
                action = actions[len(times[g])]
                s, m = action.stage, action.microbatch
                wait = {"F": ("F", s - 1, m) if s else None, "W": ("B", s, m)}.get(
                    action.kind, ("B", s + 1, m) if s + 1 < classes else ("F", s, m)
                )
                if wait is not None and wait not in done:
                    break
                start = max(free[g], done[wait] if wait else 0.0)
                end = start + unit * {"F": 1.0, "B": 2.0}.get(action.kind, 1.0)
                done["B" if action.kind in "BI" else action.kind, s, m] = free[g] = end
                times[g].append((str(action), start, end))
                progresses = True
    return times, max(free)


def timeline(classes: int, ranks: int, num_microbatches: int, spans: int) -> Json:
    actions, ends = simulated(classes, num_microbatches)
    step = ends * 1.06
    names: list[str] = []
    index: dict[str, int] = {}

    def number(name: str) -> int:
        if name not in index:
            index[name] = len(names)
            names.append(name)
        return index[name]

    rows = []
    for g, own in enumerate(actions):
        compute: Json = {key: [] for key in ("start", "end", "kind", "name", "critical")}
        communication: Json = {key: [] for key in ("start", "end", "kind", "name", "critical")}
        for name, start, end in own:
            kind = next(PASS[c] for c in name if c in PASS)
            parts = max(1, spans // (2 * sum(map(len, actions))))
            for k in range(parts):
                width = (end - start) / parts
                compute["start"].append(start + k * width)
                compute["end"].append(start + (k + 0.9) * width)
                compute["kind"].append(kind)
                compute["name"].append(number(name))
                compute["critical"].append(int(g == classes - 1 or start < 1e-3 * g))
                communication["start"].append(start + (k + 0.7) * width)
                communication["end"].append(start + (k + 1.0) * width)
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
            "text": "the forward passes of all stages, then the last stage.",
            "seconds": {"compute": 0.8 * step, "communication": 0.1 * step, "waiting": 0.1 * step},
        },
        "folded": None,
    }


def schedule(classes: int, ranks: int, num_microbatches: int) -> Json:
    actions, _ = simulated(classes, num_microbatches)
    rows = []
    for g, own in enumerate(actions):
        letters = [next(c for c in name if c in PASS) for name, _, _ in own]
        rows.append(
            {
                "label": label(g, ranks, classes),
                "start": [s for _, s, _ in own],
                "end": [e for _, _, e in own],
                "kind": letters,
                "stage": [g] * len(own),
                "microbatch": [int(n.split(c)[1]) for (n, _, _), c in zip(own, letters)],  # noqa: B905
            }
        )
    return {
        "name": "zb_h1",
        "stages": classes,
        "num_microbatches": num_microbatches,
        "bubble_fraction": 0.31,
        "rows": rows,
    }


def recorded(rows: Json, step: float) -> Json:
    """Return a run that takes 1.07 times as long, mostly for reducing gradients."""

    def stretched(lane: Json) -> Json:
        return lane | {key: [t * 1.07 for t in lane[key]] for key in ("start", "end")}

    timeline = rows | {
        "step_time_s": step * 1.07,
        "rows": [
            row | {"lanes": {k: stretched(lane) for k, lane in row["lanes"].items()}}
            for row in rows["rows"]
        ],
    }
    pairs = [("compute", "computing", 0.46, 0.48), ("gradients", "reducing gradients", 0.04, 0.09)]
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
                "text": "reducing gradients took 2.3 times as long as predicted",
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
