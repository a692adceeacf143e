"""Build the JSON of reports for the tests of the page, without planning anything."""

from __future__ import annotations

from tests.browser.sections import (
    GIB,
    Json,
    causes,
    cluster,
    code,
    collectives,
    group,
    memory,
    modules,
    plans,
    verdict,
    what_if,
)  # fmt: skip
from tests.browser.timelines import label, recorded, schedule, timeline

HOSTILE = {
    "tag": "<script>window.hacked = 1</script>",
    "close": "</script><img src=x onerror='window.hacked = 2'>",
    "quotes": "\"'`${window.hacked=3}`--><!--",
    "reversed": "safe\u202egnp.exe\u2066 \u05d0\u05d1\u05d2",
    "long": "x" * 10_240,
}


def report(
    *,
    layers: int = 4,
    operations: int = 6,
    classes: int = 4,
    ranks: int = 8,
    num_microbatches: int = 8,
    spans: int = 0,
    lines: int = 120,
    measured: bool = False,
) -> Json:
    """Return a report of a model of `layers` equal layers with `operations` each."""
    rows = timeline(classes, ranks, num_microbatches, spans)
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
        "schedule": schedule(classes, ranks, num_microbatches),
        "plans": plans(step),
        "gap": {"layouts": 0.012, "search": 0.0, "points": 468, "simulated": 64},
        "what_if": what_if(step),
        "code": code(lines),
        "collectives": collectives(),
        "measured": recorded(rows, step) if measured else None,
    }


MISSING = "No recorded run was given. shardwise report plan.json --trace run.json -o report.html"


def hostile() -> Json:
    """Return a report with names that are markup, end strings, reverse text, or are very long."""
    document = report(measured=True)
    names = list(HOSTILE.values())
    document["title"] = document["verdict"]["model"] = " ".join(names[:4])
    document["verdict"] |= {"plan": names[1], "cluster": names[2], "notes": names}
    document["verdict"]["limit"]["text"] = names[0]
    document["missing"] = dict.fromkeys(("code", "plans"), " ".join(names))
    document["plans"] = None
    for row, name in zip(document["modules"]["rows"], names, strict=False):
        row |= {"name": name, "path": name, "kind": name, "layout": name}
    for i, parameter in enumerate(document["modules"]["parameters"]):
        parameter |= {"name": names[i % 5], "layout": names[i % 5], "dtype": names[1]}
    for column in ("name", "op", "layout"):
        count = len(document["modules"]["nodes"]["module"])
        document["modules"]["nodes"][column] = [names[i % 5] for i in range(count)]
    for part in (document["modules"]["sources"], document["code"]["sources"]):
        for i, source in enumerate(part):
            source |= {"file": names[i % 5], "text": names[(i + 1) % 5]}
    document["code"]["files"][0] |= {"name": names[1]}
    document["code"]["files"][0]["lines"][:5] = names
    for i, node in enumerate(document["cluster"]["nodes"]):
        node |= {"name": names[i % 5], "kind": names[0]}
    for i, link in enumerate(document["cluster"]["links"]):
        link |= {"name": names[i % 5], "what": {names[0]: 1.0}}
    for i, row in enumerate(document["collectives"]):
        row |= {"operation": names[i], "groups": names[i + 1], "implementation": names[i + 2]}
    document["timeline"]["names"] = [
        names[i % 5] for i in range(len(document["timeline"]["names"]))
    ]
    for place in ("timeline", "schedule"):
        for i, row in enumerate(document[place]["rows"]):
            row["label"] = names[i % 5]
    for i, rank_class in enumerate(document["classes"]):
        rank_class["label"] = names[i % 5]
    for row in document["what_if"]:
        row |= {"change": names[0], "note": names[3]}
    document["measured"]["file"] = names[1]
    for row in document["measured"]["disagreements"]:
        row |= {"cause": names[0], "where": names[1], "text": names[2], "advice": names[3]}
    return document


def sparse() -> Json:
    """Return a report with little more than the verdict, of a plan that does not fit."""
    document = report(classes=1, ranks=1, num_microbatches=1)
    for key in ("modules", "cluster", "schedule", "plans", "gap", "what_if", "code", "price",
                "collectives"):  # fmt: skip
        document[key] = None
    document["missing"] = {}
    document["verdict"] |= {"tokens_per_s": None, "fits": False, "price": None, "notes": []}
    document["verdict"]["memory"] |= {"peak_bytes": 90 * GIB, "free_bytes": -16 * GIB}
    document["memory"][0] |= {"peak_bytes": 90 * GIB, "over_time": [], "times": [], "others": {}}
    row = document["timeline"]["rows"][0]
    row["lanes"] = {"compute": {key: [] for key in ("start", "end", "kind", "name", "critical")}}
    document["timeline"] |= {"critical": None, "folded": "of 4,096 micro-batches, the first 64"}
    return document


def large() -> Json:
    """Return a report of 1,024 ranks, 10,000 operations and 100,000 spans."""
    return report(
        layers=100,
        operations=100,
        classes=32,
        ranks=1024,
        num_microbatches=128,
        spans=100_000,
        lines=15_000,
    )
