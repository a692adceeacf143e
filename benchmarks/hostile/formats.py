"""A valid example of every format, and its reading as the tools do it."""

from __future__ import annotations

import csv
import io
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from shardwise.checkpoint.convert import convert_checkpoint
from shardwise.cli import main
from shardwise.collectives import Network, solve
from shardwise.collectives.messages import CollectiveChoice, MessageProgram
from shardwise.collectives.messages.check import check as check_messages
from shardwise.collectives.messages.choice import Edge, Forest, Tree
from shardwise.cost import OpTable
from shardwise.errors import PlanMismatch, ShardwiseError
from shardwise.ir import Graph
from shardwise.published.rows import read_entries
from shardwise.reports.recorded import read_trace
from shardwise.runtime.loader import load
from shardwise.schedules import Schedule, make
from shardwise.schedules.check import check as check_schedule
from shardwise.training.config import load_config
from shardwise.watch.run import Run

VERBS = ("explain", "simulate", "diff")  # of plans alone
CONFIG = """\
model: {name: tests.support.trainer:Net, args: {dropout: 0.1}}
data: {train: {name: tests.support.trainer:Samples, args: {size: 23}}, batch_size: 4, workers: 0}
steps: 8
optimizer: {name: AdamW, args: {lr: 0.02}}
lr_schedule: {name: CosineAnnealingLR, args: {T_max: total_steps}}
checkpoints: {every_steps: 2, keep_last: 3}
logs: {console: "off", jsonl: true}
folder: runs/first
plan: fsdp
"""
METRICS = "".join(
    json.dumps({"step": step, "epoch": 0.0, "loss": 1 / step, "step_s": 0.1, "memory_bytes": 1e9})
    + "\n"
    for step in range(1, 40)
)
SPREAD = {"min": 0.1, "median": 0.2, "max": 0.3}
RANKS = {
    "step": 3, "ranks": 2, "own_s": SPREAD, "step_s": SPREAD, "memory_bytes": SPREAD,
    "slowest": [{"rank": 1, "group": 0, "own_s": 0.2, "ratio": 1.5, "memory_bytes": 1e9}],
    "each": {"own_s": [0.1, 0.2], "memory_bytes": [1e9, 1e9]},
}  # fmt: skip
RUN = {
    "format": "shardwise-run", "version": 1, "model": "Net", "plan": "fsdp", "ranks": 2,
    "device": "cpu", "batch_size": 4, "first_step": 0, "total_steps": 8, "predicted_step_s": 0.1,
    "known_machines": True, "host": "somewhere", "pid": 1, "started_at": 1.0, "state": "failed",
    "error": "TrainingError: the loss is nan", "ended_at": 2.0,
}  # fmt: skip


class Net(nn.Module):
    """A few layers, two of which are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


@cache
def graph() -> Graph:
    """Return the captured model of the plans."""
    torch.manual_seed(0)
    return sw.capture(Net(), {"x": torch.ones(8, 4)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Files of one format in a folder: the damaged one, and those beside it.

    `value` is the damaged file's content as JSON data, if it is text with a structure; `kind` says
    how it is written. `sign` makes a changed value pass the format's own checksum.
    """

    name: str
    file: str
    data: bytes
    read: Callable[[Path], Any]
    value: Any = None
    kind: str = "json"
    beside: Path | None = None
    sign: Callable[[Any], Any] = field(default=lambda value: value)

    def prepare(self, folder: Path, data: bytes) -> Path:
        """Write the damaged file, and copies of its neighbours, into an empty folder."""
        if self.beside is not None:
            shutil.copytree(self.beside, folder, dirs_exist_ok=True)
        path = folder / self.file
        path.write_bytes(data)
        return path


def _plan(path: Path) -> Any:
    plan = sw.Plan.load(path)
    str(plan), plan.to_json(), plan._repr_html_()
    try:
        plan.check(graph())
    except PlanMismatch:
        return plan
    program = sw.compile(graph(), plan)
    for source in program.sources:
        load(source, graph().functions)
    return program


def _verb(verb: str) -> Callable[[Path], Any]:
    """Read a plan as a command does; it ends without a traceback."""

    def read(path: Path) -> None:
        words = [str(path)] * (2 if verb == "diff" else 1)
        try:
            main([verb, *words])
        except SystemExit as ended:
            if ended.code:
                raise ShardwiseError(f"exit code {ended.code}") from None

    return read


def _report(path: Path) -> Any:
    return sw.report(sw.Plan.load(path)).html


def _cluster(path: Path) -> Any:
    cluster = sw.Cluster.load(path)
    return str(cluster), cluster.to_yaml() if cluster.num_ranks < 10_000 else ""


def _schedule(path: Path) -> Any:
    schedule = Schedule.load(path)
    check_schedule(schedule)
    return str(schedule)


def _table(path: Path) -> Any:
    table = OpTable.load(path)
    table.lookup("aten.relu.default(float32[4])", "cpu")
    return str(table), table.to_json(), table.factors("aten.relu.default", "cpu")


def _messages(path: Path) -> Any:
    program = MessageProgram.load(path)
    return check_messages(program), str(program)


def _watch(path: Path) -> Any:
    run = Run(path.parent)
    run.poll()
    return json.dumps(run.to_json()), run.title, run.status


def _checkpoint(path: Path) -> Any:
    verify_checkpoint(path.parent)
    return load_checkpoint(path.parent, Net())


def _foreign(path: Path) -> Any:
    load_checkpoint(path.parent, Net())
    return convert_checkpoint(path.parent, path.parent.with_name("converted"), to="hf")


def _resume(path: Path) -> Any:
    from tests.support import trainer

    # The checkpoint is of the last step: its state is taken over, and nothing is left to do.
    run = path.parents[2]
    return trainer.fit(folder=str(run), steps=1, data={"evaluation": None}, logs={"console": "off"})


def _signed(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    body = {key: value for key, value in body.items() if key != "crc32"}
    text = json.dumps(body, separators=(",", ":"))
    return {**body, "crc32": zlib.crc32(text.encode())}


def _choice() -> CollectiveChoice:
    """Return an all-reduce of four ranks over a star."""
    star = (-1, 0, 0, 0)
    pairs = [(rank, 0) for rank in (1, 2, 3)] + [(0, rank) for rank in (1, 2, 3)]
    edges = [Edge(source=a, target=b, uses=(i,), latency_s=1e-6) for i, (a, b) in enumerate(pairs)]
    tree = Tree(weight=1.0, root=0, inward=star, outward=star)
    forest = Forest(
        num_ranks=4, trees=(tree,), edges=tuple(sorted(edges, key=str)), capacity=(1e9,) * 6
    )
    return CollectiveChoice(
        operation="all_reduce",
        groups=((0, 1, 2, 3),),
        uses="solved",
        min_bytes=4096,
        latency_s=1e-5,
        s_per_byte=1e-9,
        predicted_s={"library": 2e-3, "solved": 1e-3},
        chunk_bytes=65536,
        forests=(forest,),
    )


def _trace() -> dict[str, Any]:
    events = [
        {"ph": "X", "pid": rank, "tid": lane, "cat": cat, "name": f"{cat} {step}", "ts": 1e3 * step,
         "dur": 900.0, "args": {"step": step}}
        for rank in range(2)
        for step in range(3)
        for lane, cat in enumerate(("step", "compute", "waiting"))
    ]  # fmt: skip
    about = {"format": "shardwise-trace", "version": 1, "num_ranks": 2, "model": "Net", "plan": "a"}
    return {"otherData": about, "traceEvents": events}


def _csv() -> bytes:
    names = (
        "row_id,source,model,params_b,layers,hidden,ffn_hidden,heads,kv_heads,vocab,seq_len,gpu,gpus,"
        "precision,tp,pp,vpp,cp,ep,dp,zero_stage_or_sharding,micro_batch,global_batch,recompute,"
        "derived_step_time_s,mem_gib_per_gpu"
    )
    row = (
        "a:1,paper,MPT,30.0,48,7168,28672,56,56,50368,8192,H100-80GB,8,amp_bf16,1,1,1,1,1,8,"
        "FSDP FULL_SHARD (ZeRO-3),1,168,full,124.3,70.5"
    )
    return "\n".join([names, row, row.replace("a:1", "a:2"), row.replace("a:1", "a:3")]).encode()


def all_formats(base: Path) -> list[Format]:
    """Return the examples of all formats, with files that they refer to below `base`."""
    plan = sw.plan(graph(), sw.Cluster.preset("h100", devices_per_node=2))
    value = json.loads(json.dumps(plan.to_json()))
    return [
        *plain_formats(base),
        _json("searched plan", "plan.json", value, _plan),
        _json("report", "plan.json", value, _report),
        *(_json(f"shardwise {verb}", "plan.json", value, _verb(verb)) for verb in VERBS),
        *_checkpoints(base),
    ]


def plain_formats(base: Path) -> list[Format]:
    """Make the examples that need neither a search nor a training."""
    torch.manual_seed(0)
    cluster = sw.Cluster.local(2)
    plans = {
        "plan": sw.strategies.hybrid(graph(), sw.Cluster.local(4), dp=2, tp=2),
        "pipeline plan": sw.strategies.pipeline(graph(), cluster, pp=2, num_microbatches=2),
    }
    made = []
    for name, plan in plans.items():
        value = json.loads(json.dumps(plan.to_json()))
        if name == "plan":
            value["collectives"] = [json.loads(json.dumps(_choice().to_json()))]
        made.append(_json(name, "plan.json", value, _plan))
    text = cluster.to_yaml()
    made.append(_yaml("cluster", "cluster.yaml", text, _cluster))
    text = sw.Cluster.preset("h100", nodes=2).to_yaml()
    made.append(_yaml("preset cluster", "cluster.yaml", text, _cluster))
    made.append(_yaml("training config", "config.yaml", CONFIG, load_config))
    schedule = make("interleaved", num_groups=2, num_microbatches=4, num_stages=4).to_text()
    made.append(Format(name="schedule", file="a.csv", data=schedule.encode(), read=_schedule))
    table = OpTable()
    for size in range(4):
        table.add(f"aten.relu.default(float32[{size}])", "cpu", 1e-6, 2e-6)
        table.compare(f"aten.relu.default(float32[{size}])", "cpu", 2e-6, 3e-6)
    table.programs.append(("cpu", 1.1, 1.2))
    table.notes.append("nothing")
    made.append(_json("op table", "table.json", json.loads(table.to_json()), _table))
    program = solve(Network.of_cluster(sw.Cluster.local(4)), "all_reduce", 64).program
    made.append(_json("message program", "program.json", program.to_json(), _messages))
    made.append(_json("trace", "trace.json", _trace(), lambda path: read_trace(path)))
    made.append(Format(name="calibration", file="a.csv", data=_csv(), read=read_entries))
    return made + _run_files(base)


def _json(name: str, file: str, value: Any, read: Any, **more: Any) -> Format:
    return Format(
        name=name, file=file, data=json.dumps(value).encode(), read=read, value=value, **more
    )


def _yaml(name: str, file: str, text: str, read: Any) -> Format:
    value = yaml.safe_load(text)
    return Format(name=name, file=file, data=text.encode(), read=read, value=value, kind="yaml")


def _run_files(base: Path) -> list[Format]:
    folder = base / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(METRICS)
    (folder / "ranks.jsonl").write_text(json.dumps(RANKS) + "\n")
    (folder / "run.json").write_text(json.dumps(RUN))
    return [
        _json("run.json", "run.json", RUN, _watch, beside=folder),
        Format(
            name="metrics", file="metrics.jsonl", data=METRICS.encode(), read=_watch, beside=folder
        ),
        _json("ranks", "ranks.jsonl", RANKS, _watch, beside=folder),
    ]


def _checkpoints(base: Path) -> list[Format]:
    own, foreign, training = base / "own", base / "foreign", base / "training"
    torch.manual_seed(0)
    model = Net()
    save_checkpoint(own, model, torch.optim.AdamW(model.parameters()), step=3, extra={"note": "a"})
    foreign.mkdir()
    save_file(model.state_dict(), foreign / "model-00001.safetensors")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "model-00001.safetensors")}
    (foreign / "model.safetensors.index.json").write_text(json.dumps(index))
    (foreign / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 4}))
    manifest = json.loads((own / "checkpoint.json").read_text())
    tensors = next(own.glob("*.safetensors"))
    from tests.support import trainer

    trainer.fit(folder=str(training), steps=1, data={"evaluation": None}, logs={"console": "off"})
    (saved,) = training.glob("checkpoints/*/checkpoint.json")
    state = json.loads(saved.read_text())
    weights = foreign / "model-00001.safetensors"
    return [
        _json("checkpoint", "checkpoint.json", manifest, _checkpoint, beside=own, sign=_signed),
        _binary("checkpoint tensors", tensors.name, tensors, _checkpoint, own),
        _json(
            "training state", str(saved.relative_to(training)), state, _resume,
            beside=training, sign=_signed,
        ),
        _json(
            "Hugging Face index", "model.safetensors.index.json", index, _foreign, beside=foreign
        ),
        _binary("Hugging Face tensors", weights.name, weights, _foreign, foreign),
        _json(
            "Hugging Face config", "config.json", {"model_type": "gpt2"}, _foreign, beside=foreign
        ),
    ]  # fmt: skip


def _binary(name: str, file: str, path: Path, read: Any, beside: Path) -> Format:
    """Return a safetensors file; its header is its value."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return Format(
        name=name, file=file, data=data, read=read, value=header, kind="safetensors", beside=beside
    )


def with_header(data: bytes, header: Any) -> bytes:
    """Return a safetensors file with another header."""
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def csv_cells(data: bytes) -> list[list[str]]:
    """Return the cells of a CSV file."""
    return list(csv.reader(io.StringIO(data.decode())))
