"""The cluster file: every field matters, and errors name the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import yaml

from shardwise.cluster import Cluster, Device, Link
from shardwise.collectives import Network
from shardwise.cost import collective_model
from shardwise.cost.selection import select
from shardwise.errors import ClusterError
from shardwise.launch import launch_commands
from shardwise.schema import field_names

SAMPLE = """
version: 2
name: sample
port: 29400
start: {folder: /work, python: ~/env/bin/python, environment: {NCCL_DEBUG: INFO}}
devices:
  quick:
    kind: cuda
    memory_gib: 80
    reserved_gib: 1.5
    matmul_flops_per_s: {bfloat16: [[256, 1.0e+14], [8192, 7.0e+14]], float32: 5.0e+13}
    attention_flops_per_s: {bfloat16: [[512, 1.0e+14], [4096, 4.0e+14]]}
    memory_bytes_per_s: [[65536, 2.0e+11], [1.0e+8, 3.0e+12]]
    overhead_s: 5.0e-6
    host_bytes_per_s: 5.0e+10
    host_memory_gib: 200
    price_per_hour: 3.5
    overlap_loss: 0.25
    compute_factor: 1.25
    update_factor: 0.75
    speed: 1
  slow: {preset: v100, speed: 0.9}
nodes:
  - name: big[0-3]
    devices: {quick: 4}
    address: 10.0.0.[1-4]
    ssh: {user: train, key: ~/.ssh/id, port: 2222, program: slogin, options: [Compression=yes]}
    start: {folder: /big, python: /usr/bin/python3, environment: {NCCL_DEBUG: WARN}}
    link:
      bandwidth_gb_per_s: 450
      latency_us: 1.5
      bus_gb_per_s: 1000
      efficiency: 0.8
      collectives:
        all_gather: 1.2
        all_reduce: [{ranks: 2, latency: 2, bytes: [[1000, 1.1], [1.0e+6, 1.3]]}, {ranks: 4}]
      shared: {all_reduce: {latency: 2, bytes: 0.5}}
      message_us: 12
    nic: {count: 2, bandwidth_gbit_per_s: 400, latency_us: 2, efficiency: 0.9}
  - name: small
    devices: [slow, {device: quick, count: 2, speed: 0.5}]
    link: {bandwidth_gb_per_s: 100, latency_us: 2}
    nic: {bandwidth_gbit_per_s: 100}
  - name: rack[0-3]
    devices: {quick: 2}
    nic: {bandwidth_gbit_per_s: 100}
network:
  latency_us: 3
  message_us: 20
  collectives: {reduce_scatter: {latency: 1.5, bytes: 1.3}}
  domains:
    - {nodes: "rack[0-3]", every: 2, link: {bandwidth_gb_per_s: 900, latency_us: 2}}
  switches:
    - {name: leaf, nodes: "big[0-3]", every: 2, oversubscription: 8, latency_us: 1}
    - {name: pod, nodes: [small, "big[0-3]"], uplink_gbit_per_s: 30, latency_us: 0.5}
  trunks:
    - name: wan
      between: ["big[0-3]", "rack[0-3]"]
      bandwidth_gbit_per_s: 10
      latency_us: 500
"""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def figures(cluster: Cluster) -> dict[str, Any]:
    """Return everything that an estimate or a launch uses of a cluster."""
    figures: dict[str, Any] = {"ranks": cluster.num_ranks}
    for rank in range(cluster.num_ranks):
        device = cluster.device(rank)
        figures[f"device {rank}"] = (
            device.kind,
            device.usable_bytes,
            device.memory_bytes,
            {d: [device.matmul_rate(d, n, n, n) for n in (64, 1000, 1e5)] for d in device.dtypes},
            [device.attention_rate(d, n) for d in device.dtypes for n in (64, 1000, 1e5)],
            [device.memory_rate(n) for n in (1e3, 1e6, 1e9)],
            device.overhead_s,
            device.host_bytes_per_s,
            device.host_memory_bytes,
            device.price_per_hour,
            device.overlap_loss,
            (device.compute_factor, device.update_factor),
        )
    paths = [(a, b) for a in range(cluster.num_ranks) for b in range(0, cluster.num_ranks, 6)]
    figures["paths"] = [cluster.path(a, b) for a, b in paths]
    figures["capacities"] = dict(cluster.capacities)
    half = cluster.num_ranks // 2
    shapes = {"inside": [[0, 1], [2, 3]], "three": [[0, 1, 2]], "all": [range(cluster.num_ranks)]}
    shapes["across"] = np.arange(2 * half).reshape(2, half).T
    for name, groups in shapes.items():
        for operation in OPERATIONS:
            if operation != "send" or len(groups[0]) == 2:
                model = collective_model(cluster, operation, groups)
                figures[f"{operation} {name}"] = [model.seconds(n) for n in (0, 1e4, 1e9)]
    shared = select(cluster, "all_reduce", [[0, 1]], use="shared")
    figures["shared"] = shared.to_json() if shared is not None else None
    figures["message_s"] = [Network.of_cluster(cluster, r).message_s for r in ([0, 1], [0, 5])]
    figures["launch"] = launch_commands(cluster, ["train.py"])
    return figures


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every scalar."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key)


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """Return another valid value of the field."""
    names = {
        "kind": "cpu",
        "preset": "a100",
        "address": "10.0.1.[1-4]",
        "device": "slow",
        "slow": "quick",
        "big[0-3]": "big[0-1]",
        "small": "rack[0-3]",
        "rack[0-3]": "rack[0,2,1,3]",
    }
    if path[0] == "start" or ({"ssh", "start"} & set(path) and isinstance(value, str)):
        return f"other-{value}"
    if path[-1] == "name":
        return f"other-{value}"
    if "between" in path:
        return value.replace("-3", "-1")
    if isinstance(value, str):
        return names.get(path[-1]) or names[value]
    return value + 1 if isinstance(value, int) else value * 1.25


DOCUMENT = yaml.safe_load(SAMPLE)
NAMES = {("name",), ("version",)}
FIELDS = [path for path in leaves(DOCUMENT) if path not in NAMES]


def put(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def get(path: tuple[Any, ...]) -> Any:
    place: Any = DOCUMENT
    for key in path:
        place = place[key]
    return place


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return figures(Cluster.from_yaml(SAMPLE))


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: ".".join(map(str, path)))
def test_every_field_changes_a_figure_or_the_launch(
    path: tuple[Any, ...], before: dict[str, Any]
) -> None:
    document = put(path, changed(get(path), path))
    if path == ("devices", "quick", "kind"):
        document["devices"]["slow"]["kind"] = "cpu"  # a node's devices are of one kind
    if path[-1] == "name" and path[0] == "nodes":  # whoever names the node follows
        old, new = get(path), document["nodes"][path[1]]["name"]
        text = json.dumps(document["network"]).replace(json.dumps(old), json.dumps(new))
        document["network"] = json.loads(text)
    after = figures(Cluster.from_yaml(json.dumps(document)))
    assert after != before


def test_the_sample_has_every_field() -> None:
    given = {key for path in leaves(DOCUMENT) for key in path}
    assert {"preset", *field_names(Device), *field_names(Link)} <= given


def test_the_sample_round_trips() -> None:
    cluster = Cluster.from_yaml(SAMPLE)
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    assert Cluster.from_yaml(json.dumps(DOCUMENT)) == cluster
    assert cluster.num_ranks == 4 * 4 + 3 + 8
    assert [cluster.device(rank).speed for rank in (16, 17, 18)] == [0.9, 0.5, 0.5]


def edit(*path: Any, **given: Any) -> str:
    """Return the sample with fields of the part at `path` set, or removed if None."""
    document = copy.deepcopy(DOCUMENT)
    place = document
    for key in path:
        place = place[key]
    for name, value in given.items():
        if value is None:
            place.pop(name)
        else:
            place[name] = value
    return json.dumps(document, indent=1)


QUICK = ("devices", "quick")


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        (edit(netwrk={}), "unknown field 'netwrk'; did you mean 'network'", "(netwrk)"),
        (edit(nodes=None), "field 'nodes' is missing", "c.yaml:1"),
        (edit(version=9), "version 9", "(version)"),
        (edit(version=None), "version None", "c.yaml:1"),
        (edit(nodes=[]), "has no nodes", "c.yaml"),
        (edit(nodes={}), "must be a list", "(nodes)"),
        (edit(network=3), "latency_us", "(network)"),
        (edit("nodes", 0, devices={"quik": 8}), "no device 'quik'; did you mean 'quick'", "quik"),
        (edit("nodes", 0, devices={"quick": 0}), "must be a whole number", "quick"),
        (edit("nodes", 0, devices={"quick": 1.5}), "must be a whole number", "quick"),
        (edit("nodes", 0, address="10.0.0.[1-3]"), "3 addresses in", "nodes[0]"),
        (edit("nodes", 0, name="big[3-0]"), "neither a name nor a range", "nodes[0].name"),
        (edit("nodes", 1, name="x[a-c]"), "neither a name nor a range", "nodes[1].name"),
        (edit("nodes", 1, name="x[0-99999999]"), "more than 1,000,000", "nodes[1].name"),
        (edit("nodes", 1, name="big2"), "2 nodes are named 'big2'", "(nodes[1], node big2)"),
        (edit("nodes", 1, link=None), "3 devices", "(nodes[1], node small)"),
        (edit(port=10**5), "port is '100000'", "(port)"),
        (edit("network", "switches", 1, nodes="big[9-1]"), "neither a", "switches[1].nodes"),
        (edit("network", "trunks", 0, between=["small", "zz"]), "no node 'zz'", "trunks[0], trunk"),
        (edit("network", "trunks", 0, between=["small"] * 2), "at both ends", "trunks[0], trunk"),
        (edit(*QUICK, memory_gib="eight"), "memory_gib is 'eight'", "devices.quick.memory_gib"),
        (edit(*QUICK, reserved_gib=90), "90.00 GiB of", "devices.quick"),
        (edit(*QUICK, matmul_flops_per_s=3), "is '3'", "matmul_flops_per_s"),
        (edit(*QUICK, memory_bytes_per_s=[[2, 3], [1, 4]]), "must ascend", "memory_bytes_per_s"),
        (edit(*QUICK, memory_bytes_per_s=[[2]]), "1 items, must have 2", "memory_bytes_per_s[0]"),
        (edit(*QUICK, kind="gpu"), "kind 'gpu'", "devices.quick.kind"),
        (edit(*QUICK, speed=-1), "speed is '-1'", "devices.quick.speed"),
        (edit(*QUICK, speed="inf"), "speed is 'inf'", "devices.quick.speed"),
        (edit(*QUICK, overhead_s=1e-300), "not between 1e-20 and 1e+20", "quick.overhead_s"),
        (edit(*QUICK, overlap_loss=30), "between 0 and 1", "devices.quick.overlap_loss"),
        (
            edit(*QUICK, attention_flops_per_s={"bfloat61": 1e14}),
            "'bfloat61'; did you mean 'bfloat16'",
            "devices.quick",
        ),
        (edit("nodes", 0, devices={"quick": 10**18}), "1,000,000", "quick"),
        (edit("nodes", 0, name="big[0-999999]"), "addresses", "nodes[0]"),
        (edit("nodes", 0, name="big[0-9999999999999]"), "more than 1,000,000", "nodes[0]"),
        (edit("nodes", 0, "ssh", port=10**5), "port is '100000'", "nodes[0].ssh"),
        (edit("nodes", 0, "nic", efficiency=90), "at most 2", "nodes[0].nic.efficiency"),
        (edit("network", "switches", 1, nodes=[]), "no node", "switch pod"),
        (edit("network", "trunks", 0, latency_us="inf"), "latency_us is 'inf'", "trunks[0]"),
        (edit("devices", "slow", preset="h1000"), "no preset 'h1000'; did you mean", "slow"),
        (edit("nodes", 0, "link", latency_us=-1), "latency_us is '-1'", "nodes[0].link.latency_us"),
        (edit("nodes", 0, "link", collectives={"x": 1}), "collective 'x'", "nodes[0].link"),
        (edit("nodes", 0, nic=None), "has no nic", "big[0-3]"),
        (
            edit("network", "trunks", 0, between=["small"]),
            "1 items, must have 2",
            "trunks[0].between",
        ),
        (edit("network", "switches", 1, oversubscription=2), "mutually exclusive", "switches[1]"),
        ("a: {", "not plain YAML", "c.yaml:"),
        ("", "the file is empty", "c.yaml"),
        ("version: 2\nname: a\nname: b\n", "duplicate field 'name'", "c.yaml:3"),
    ],
)
def test_errors_of_a_file_name_the_place(text: str, message: str, place: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(text, "c.yaml")
    assert message in str(caught.value)
    assert "c.yaml" in str(caught.value.where)
    assert place in str(caught.value.where)


def test_an_error_names_the_line() -> None:
    text = SAMPLE.replace("overhead_s:", "overhead_seconds:")
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(text, "c.yaml")
    assert caught.value.where == "c.yaml:14 (devices.quick.overhead_seconds)"
    assert "did you mean 'overhead_s'" in caught.value.message


@pytest.mark.parametrize("value", [".inf", "inf", "-.inf", ".nan", "nan"])
def test_infinite_values_raise(value: str) -> None:
    for field in ("bandwidth_gb_per_s: 450", "bandwidth_gbit_per_s: 400", "uplink_gbit_per_s: 30"):
        name = field.partition(":")[0]
        with pytest.raises(ClusterError, match=f"{name} is '{value}', must be a finite") as caught:
            Cluster.from_yaml(SAMPLE.replace(field, f"{name}: {value}", 1), "c.yaml")
        assert name in str(caught.value.where)
        assert "c.yaml:" in str(caught.value.where)


def test_hints_are_valid_input() -> None:
    for number in ("0", "1.5", "-3", "many", "[]"):
        with pytest.raises(ClusterError) as caught:
            Cluster.from_yaml(SAMPLE.replace("{quick: 4}", f"{{quick: {number}}}"), "c.yaml")
        Cluster.from_yaml(SAMPLE.replace("quick: 4", str(caught.value.hint)))


def test_no_code_in_a_file_is_run() -> None:
    with pytest.raises(ClusterError):
        Cluster.from_yaml("version: !!python/object/apply:os.system ['true']", "c.yaml")
