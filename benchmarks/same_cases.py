"""The jobs of `benchmarks.same`, each of which computes named texts.

A job returns a `Result`: texts by "section/name", and the CPU seconds of planning. A text is the
source of an emitted file, or JSON in a canonical form (sorted keys, exact floats, sentences reduced
to their numbers), so that a change of wording does not matter but a change of any figure does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from benchmarks import quality_cases
from shardwise.errors import ShardwiseError
from tests.support import clusters, zoo
from tests.support.pool import Pool

SECTIONS = {
    "emit": "emitted sources",
    "plans": "plan files",
    "search": "figures of automatic plans",
    "estimates": "simulated steps",
    "memory": "predicted memory",
    "predictions": "published configurations",
    "certificates": "equivalence checks",
    "checkpoints": "checkpoint files",
    "schedules": "pipeline schedules",
    "clusters": "cluster files",
}
QUICK_MODELS = ("mlp", "fused_gpt", "llama")
CHANGING_FILES = r"\b(zoo_models|zoo|quality_cases|models|training)\.py:\d+"  # of this repository


@dataclass(frozen=True, kw_only=True)
class Result:
    """Texts by "section/name", and CPU seconds of planning by name."""

    items: dict[str, str] = field(default_factory=dict)
    planning_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A part of the record; `sections` are those that it contributes to."""

    sections: tuple[str, ...]
    run: Callable[[], Result]
    quick: bool = False


# ------------------------------------------------------------------ canonical texts


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and exact floats, a line per value."""
    return json.dumps(_reduced(value), indent=1, sort_keys=True, default=str)


def _reduced(value: Any) -> Any:
    """Replace sentences by their numbers, and lines in this repository by their files."""
    if isinstance(value, Mapping):
        return {str(key): _reduced(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_reduced(entry) for entry in value]
    if isinstance(value, str):
        return numbers(value) if " " in value.strip() else without_lines(value)
    return value


def numbers(sentence: str) -> str:
    """Return the numbers in a sentence."""
    return "numbers: " + " ".join(re.findall(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", sentence))


def without_lines(text: str) -> str:
    """Remove folders, and line numbers in files of this repository."""
    text = re.sub(r"[\w./-]*/([\w-]+\.py:\d+)", r"\1", text)
    return re.sub(CHANGING_FILES, r"\1.py", text)


def refusal(error: ShardwiseError) -> str:
    """Return the class, place and numbers of an error."""
    where = numbers(error.where) if error.where and " " in error.where else error.where
    return canonical(
        {"error": type(error).__name__, "where": where, "numbers": numbers(error.message)}
    )


# ------------------------------------------------------------------ emitted sources


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named strategy on some ranks, with its options."""

    strategy: str
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0

    def plan(self, graph: sw.Graph) -> sw.Plan:
        """Return the plan of this case."""
        make = getattr(sw.strategies, self.strategy)
        plan: sw.Plan = make(graph, sw.Cluster.local(self.ranks), **self.options)
        return plan


def _case(strategy: str, ranks: int, **options: Any) -> Case:
    return Case(strategy=strategy, ranks=ranks, options=options)


CASES = {  # every model
    "ddp": _case("ddp", 2),
    "fsdp": _case("fsdp", 2),
    "tensor": _case("tensor", 2),
    "hybrid": _case("hybrid", 4, dp=2, tp=2),
    "pipeline": _case("pipeline", 2, pp=2, num_microbatches=2),
    "hybrid_pp": _case("hybrid", 8, dp=2, tp=2, pp=2, num_microbatches=2),
}
FURTHER_MODELS = ("mlp", "resnet", "fused_gpt", "llama", "t5", "mixtral")
FURTHER_CASES = {
    "fsdp_3": _case("fsdp", 3),
    "tensor_3": _case("tensor", 3),
    "tensor_4": _case("tensor", 4),
    "zero1": _case("zero1", 2),
    "zero2": _case("zero2", 2, num_microbatches=2),
    "accumulate": _case("ddp", 2, num_microbatches=2),
    "per_microbatch": _case("ddp", 2, num_microbatches=2, per_microbatch=True),
    "hybrid_zero3": _case("hybrid", 4, dp=2, tp=2, zero=3),
    "gpipe": _case("pipeline", 2, pp=2, num_microbatches=4, schedule="gpipe"),
    "interleaved": _case("pipeline", 2, pp=2, num_microbatches=4, schedule="interleaved"),
    "zb_h1": _case("pipeline", 2, pp=2, num_microbatches=4, schedule="zb_h1"),
    "zb_v": _case("pipeline", 2, pp=2, num_microbatches=4, schedule="zb_v"),
    "stage_ranks": _case("pipeline", 3, pp=2, num_microbatches=2, stage_ranks=(1, 2)),
    "recompute_full": _case("fsdp", 2, recompute="full"),
    "recompute_selective": _case("tensor", 2, recompute="selective"),
    "recompute_pipeline": _case(
        "pipeline", 2, pp=2, num_microbatches=2, recompute="full", schedule="zb_h1"
    ),
    "offload_optimizer": _case("zero1", 2, offload="optimizer"),
    "offload_parameters": _case("fsdp", 2, offload="parameters"),
    "offload_activations": _case("ddp", 2, offload="activations"),
    "shares": _case("tensor", 2, shares={"tp": (1, 3)}),
    "shares_batch": _case("fsdp", 2, shares={"dp": (1, 3)}),
    "bf16": replace(_case("fsdp", 2, precision="bf16"), dtype=torch.float32),
    "fp16": replace(_case("tensor", 2, precision="fp16"), dtype=torch.float32),
    "dropout": replace(_case("tensor", 2), dropout=0.1),
    "dropout_pipeline": replace(
        _case("pipeline", 2, pp=2, num_microbatches=2, recompute="full"), dropout=0.1
    ),
}
MEMORY_CASES = ("ddp", "tensor", "pipeline", "zero2", "recompute_full", "zb_v", "bf16")
SIMULATED_ON = "a100"


def model_job(name: str, cases: Mapping[str, Case], memory: bool) -> Result:
    """Plan, compile and simulate one model of the zoo under every case."""
    items: dict[str, str] = {}
    graphs: dict[tuple[torch.dtype, float], sw.Graph] = {}
    for label, case in cases.items():
        key = (case.dtype, case.dropout)
        model, batch = zoo.build(name, dtype=case.dtype, dropout=case.dropout)
        if key not in graphs:
            graphs[key] = sw.capture(model, batch)
        where = f"{name}/{label}"
        try:
            plan = case.plan(graphs[key])
            graph = graphs[key]
            if case.options.keys() & {"precision", "per_microbatch"}:
                graph = sw.capture(model, batch, plan=plan)
            items |= _named(f"emit/{where}", sources(graph, plan))
        except ShardwiseError as error:
            items[f"emit/{where}"] = refusal(error)
            continue
        items[f"plans/{where}"] = decisions(plan)
        cluster = sw.Cluster.preset(SIMULATED_ON, nodes=1, devices_per_node=case.ranks)
        items[f"estimates/{where}"] = estimate(graph, plan, cluster)
        if memory and label in MEMORY_CASES:
            for rank in range(case.ranks):
                use = sw.compile(graph, plan).memory(rank).to_json()
                parts = {f"{part}_bytes": size for part, size in use.pop("parts").items()}
                items[f"memory/{where}/{rank}"] = canonical({**use, **parts})
    return Result(items=items)


def estimate(graph: sw.Graph, plan: sw.Plan, cluster: sw.Cluster) -> str:
    """Return the figures of a simulated step."""
    try:
        return canonical(sw.simulate(graph, plan, cluster).to_json())
    except ShardwiseError as error:
        return refusal(error)


def sources(graph: sw.Graph, plan: sw.Plan) -> dict[str, str]:
    """Return the emitted files of a plan, and the ranks that run each of them."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = sw.compile(graph, plan).save(folder)
        texts = {file: without_lines((Path(folder) / file).read_text()) for file in sorted(ranks)}
    texts = {f: re.sub(r"shardwise \S+ for", "shardwise for", t) for f, t in texts.items()}
    return {**texts, "ranks": canonical(ranks)}


def decisions(plan: sw.Plan) -> str:
    """Return the decisions of a plan: its file without notes and figures of the search."""
    data = dict(plan.to_json())
    for key in ("notes", "search"):
        data.pop(key, None)
    return canonical(data)


def _named(prefix: str, texts: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}/{name}": text for name, text in texts.items()}


# ------------------------------------------------------------------ automatic plans


def zoo_graph(name: str) -> sw.Graph:
    """Capture a model of the zoo in float32."""
    return sw.capture(*zoo.build(name, dtype=torch.float32))


def preset(kind: str, nodes: int, devices: int) -> Callable[[], sw.Cluster]:
    """Return a function that builds equal nodes."""
    return lambda: sw.Cluster.preset(kind, nodes=nodes, devices_per_node=devices)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A model and a cluster for a search."""

    graph: Callable[[], sw.Graph]
    cluster: Callable[[], sw.Cluster]
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False


def _planned(
    model: str, cluster: Callable[[], sw.Cluster], quick: bool = False, **options: Any
) -> Planned:
    graph = functools.partial(zoo_graph, model)
    return Planned(graph=graph, cluster=cluster, options=options, quick=quick)


PLANNED = {
    "mlp on 4": _planned("mlp", preset("a100", 1, 4), quick=True, all_devices=True),
    "fused_gpt on 4": _planned("fused_gpt", preset("a100", 1, 4), quick=True, all_devices=True),
    "fused_gpt infeasible": _planned(
        "fused_gpt", preset("a100", 1, 2), quick=True, memory_gib=0.0001
    ),
    "fused_gpt in little memory": _planned(
        "fused_gpt", preset("a100", 1, 4), memory_gib=0.002, all_devices=True
    ),
    "fused_gpt, sizes fixed": _planned(
        "fused_gpt", preset("h100", 2, 2), dp=1, tp=2, pp=2, num_microbatches=2
    ),
    "fused_gpt in bf16": _planned(
        "fused_gpt", preset("h100", 1, 4), precision="bf16", all_devices=True
    ),
    "fused_gpt constrained": _planned(
        "fused_gpt", preset("h100", 1, 2), constraints={"tok.weight": {"tp": "0"}}, tp=2
    ),
    "llama on 2x4": _planned("llama", preset("h100", 2, 4), all_devices=True),
    "llama on unequal links": _planned(
        "llama", functools.partial(clusters.uneven, 4), all_devices=True
    ),
    "llama on unequal devices": _planned("llama", quality_cases.unequal, quick=True),
    "t5 on 2x2": _planned("t5", preset("a100", 2, 2), all_devices=True),
    "resnet on 8": _planned("resnet", preset("v100", 1, 8), all_devices=True),
    "mixtral on 4": _planned("mixtral", preset("a100", 1, 4), all_devices=True),
    **{
        f"large: {case.name}": Planned(graph=case.graph, cluster=case.cluster)
        for case in quality_cases.CASES
    },
}


def planned_job(name: str) -> Result:
    """Search for a plan; record its decisions, its figures and the time of planning."""
    case = PLANNED[name]
    graph, cluster = case.graph(), case.cluster()
    begun = time.process_time()
    try:
        plan = sw.plan(graph, cluster, progress=False, **case.options)
    except ShardwiseError as error:
        seconds = time.process_time() - begun
        return Result(items={f"plans/{name}": refusal(error)}, planning_s={name: seconds})
    seconds = time.process_time() - begun
    items = {
        f"plans/{name}": decisions(plan),
        f"search/{name}": canonical(plan.to_json()["search"]),
        f"estimates/{name}": estimate(graph, plan, cluster),
    }
    return Result(items=items, planning_s={name: seconds})


def collectives_job() -> Result:
    """Choose implementations of collectives on unequal links."""
    graph = zoo_graph("mlp")
    items = {}
    for label, cluster in {
        "uneven": clusters.uneven(4),
        "cards": clusters.cards(800, 400, 400, 200),
        "two per host": clusters.cards(800, 200, devices=2),
        "shared memory": clusters.measured(4),
    }.items():
        for strategy in ("ddp", "tensor", "fsdp"):
            plan = getattr(sw.strategies, strategy)(graph, cluster)
            for use in ("", "solved", "hierarchical"):
                where = f"collectives/{label}/{strategy}/{use or 'chosen'}"
                try:
                    chosen = sw.collectives.choose(plan, cluster, use=use)
                except ShardwiseError as error:
                    items[f"plans/{where}"] = refusal(error)
                    continue
                items[f"plans/{where}"] = decisions(chosen)
                items[f"estimates/{where}"] = estimate(graph, chosen, cluster)
    return Result(items=items)


# ------------------------------------------------------------------ predictions, certificates


def published_table() -> Path | None:
    """Return the table of published configurations next to the repository, if present."""
    for folder in Path(__file__).resolve().parents:
        path = folder / "shared/data/published_calibration.csv"
        if path.exists():
            return path
    return None


def predictions_job() -> Result:
    """Predict every published configuration."""
    path = published_table()
    if path is None:
        return Result()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "predictions.csv"
        command = [sys.executable, "-m", "shardwise.cli", "predict"]
        command += ["--csv", str(path), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        header, *rows = out.read_text().splitlines()
    items = {"predictions/columns": header}
    for number, row in enumerate(rows):
        items[f"predictions/{number:03} {row.split(',')[0]}"] = row
    return Result(items=items)


CERTIFIED = {
    "mlp": ("ddp", "fsdp_3", "tensor", "hybrid_pp", "zb_v"),
    "fused_gpt": ("tensor", "hybrid_zero3", "interleaved", "recompute_full", "shares"),
    "resnet": ("hybrid", "pipeline"),
}


def certificate_job(name: str) -> Result:
    """Verify a model under several plans, and on a scaled twin."""
    items = {}
    for label in CERTIFIED[name]:
        model, batch = zoo.build(name)
        for limit in (None, 1.0) if name == "fused_gpt" else (None,):
            where = f"certificates/{name}/{label}" + ("/twin" if limit else "")
            try:
                plan = {**CASES, **FURTHER_CASES}[label].plan(sw.capture(model, batch))
                items[where] = certificate(sw.verify(model, batch, plan, max_bytes=limit))
            except ShardwiseError as error:
                items[where] = refusal(error)
    return Result(items=items)


def certificate(checked: sw.types.Certificate) -> str:
    """Return the comparisons of a certificate without errors, which are rounding."""
    compared = sorted(
        [*(word for word in c.what.split() if not word.isalpha()), "ok" if c.ok else "differs"]
        for c in checked.comparisons
    )
    return canonical(
        {
            "ok": checked.ok,
            "compared": ["/".join(names) for names in compared],
            "trials": len(checked.trials),
            "not_exercised": len(checked.not_exercised),
            "scaled": list(checked.scaled),
            "mesh": checked.mesh,
        }
    )


# ------------------------------------------------------------------ files


def digests(folder: Path) -> dict[str, str]:
    """Return the size and SHA-256 of every file under a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        str(p.relative_to(folder)): f"{len(data)} bytes, {hashlib.sha256(data).hexdigest()}"
        for p, data in ((p, p.read_bytes()) for p in files)
    }


SAVED: dict[
    str, tuple[int, str, dict[str, Any]]
] = {  # ranks, strategy, options; one rank is plain PyTorch
    "one": (1, "", {}),
    "fsdp": (2, "fsdp", {}),
    "tensor": (2, "tensor", {}),
    "pipeline": (2, "pipeline", {"pp": 2, "num_microbatches": 2}),
    "shares": (2, "tensor", {"shares": {"tp": (1, 3)}}),
}


def save_rank(label: str, name: str, folder: str) -> None:
    """Save a model and the state of its optimizer, on all ranks."""
    ranks, strategy, options = SAVED[label]
    model, batch = zoo.build(name, dtype=torch.float32)
    module = model
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if strategy:
        graph = sw.capture(model, batch)
        plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **options)
        module = sw.parallelize(model, batch, plan=plan)
        optimizer = sw.optimizer(module, torch.optim.AdamW, lr=0.01)
        module.train_step(batch)
    else:
        zoo.loss_of(model(**batch)).backward()  # type: ignore[no-untyped-call]
    for parameter in module.parameters():  # for state without rounding
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sw.save_checkpoint(folder, module, optimizer, step=1, extra={"seen": 7})


def checkpoint_job(name: str) -> Result:
    """Save with one process and with two, and export to Hugging Face files."""
    items = {}
    pool = Pool(2)
    try:
        with tempfile.TemporaryDirectory() as root:
            for label, (ranks, _, _) in SAVED.items():
                folder = Path(root) / label
                if ranks == 1:
                    save_rank(label, name, str(folder))
                else:
                    pool.run(save_rank, label, name, str(folder), timeout=300.0)
                items[f"checkpoints/{name}/{label}"] = _lines(digests(folder))
                manifest = json.loads((folder / "checkpoint.json").read_text())
                items[f"checkpoints/{name}/{label}/manifest"] = canonical(manifest)
                exported = Path(root) / f"{label}_exported"
                sw.export(folder, exported, config={"model_type": name})
                items[f"checkpoints/{name}/{label}/exported"] = _lines(digests(exported))
    finally:
        pool.close()
    return Result(items=items)


def _lines(texts: Mapping[str, str]) -> str:
    return "".join(f"{name}: {text}\n" for name, text in texts.items())


def schedules_job() -> Result:
    """Write every pipeline schedule in several sizes."""
    items = {}
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zb_h1", "zb_v"):
        for groups, count in ((1, 1), (2, 2), (2, 5), (3, 7), (4, 8), (8, 16)):
            where = f"schedules/{name}/{groups} groups, {count} micro-batches"
            try:
                schedule = sw.schedules.make(name, num_groups=groups, num_microbatches=count)
                items[where] = schedule.to_text()
            except ShardwiseError as error:
                items[where] = refusal(error)
    return Result(items=items)


CLUSTERS: dict[str, Callable[[], sw.Cluster]] = {
    **{kind: preset(kind, 2, 4) for kind in ("v100", "a100", "h100", "b200", "cpu")},
    "unequal devices": quality_cases.unequal,
    "slow network": quality_cases.slow_network,
    "uneven": functools.partial(clusters.uneven, 4),
    "cards": functools.partial(clusters.cards, 800, 400, devices=2),
    "measured": functools.partial(clusters.measured, 4),
}


def clusters_job() -> Result:
    """Write clusters as files, read them, and write them again."""
    items = {}
    for name, make in CLUSTERS.items():
        try:
            text = make().to_yaml()
        except ShardwiseError as error:
            items[f"clusters/{name}"] = refusal(error)
            continue
        items[f"clusters/{name}"] = text
        items[f"clusters/{name}/read again"] = sw.Cluster.from_yaml(text, name).to_yaml()
    return Result(items=items)


# ------------------------------------------------------------------ all jobs


def jobs() -> dict[str, Job]:
    """Return every job by name, the longest first."""
    return dict(_jobs())


def _jobs() -> Iterator[tuple[str, Job]]:
    yield "published", Job(sections=("predictions",), run=predictions_job)
    for name, case in PLANNED.items():
        run = functools.partial(planned_job, name)
        yield f"plan {name}", Job(sections=("plans", "search"), run=run, quick=case.quick)
    emitted = ("emit", "plans", "estimates")
    for name in zoo.names():
        run = functools.partial(model_job, name, CASES, name in QUICK_MODELS)
        sections = (*emitted, "memory") if name in QUICK_MODELS else emitted
        yield f"model {name}", Job(sections=sections, run=run, quick=name in QUICK_MODELS)
    for name in FURTHER_MODELS:
        run = functools.partial(model_job, name, FURTHER_CASES, name in QUICK_MODELS)
        yield f"further {name}", Job(sections=(*emitted, "memory"), run=run, quick=name == "mlp")
    for name in CERTIFIED:
        run = functools.partial(certificate_job, name)
        yield f"verify {name}", Job(sections=("certificates",), run=run, quick=name == "mlp")
    yield (
        "checkpoints",
        Job(sections=("checkpoints",), run=functools.partial(checkpoint_job, "mlp"), quick=True),
    )
    yield "collectives", Job(sections=("plans", "estimates"), run=collectives_job, quick=True)
    yield "schedules", Job(sections=("schedules",), run=schedules_job, quick=True)
    yield "clusters", Job(sections=("clusters",), run=clusters_job, quick=True)
