"""Reading a cluster file.

Enters: YAML or JSON text. Leaves: `Cluster`. `docs/guides/clusters.md` says what each field means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from shardwise.cluster.cluster import (
    AS_HERE,
    DEFAULT_PORT,
    SSH_PORT,
    SSH_PROGRAM,
    Cluster,
    ClusterNode,
    Ssh,
    Start,
    require_port,
)
from shardwise.cluster.device import Curve, Device, Rates
from shardwise.cluster.entries import Entry, parse
from shardwise.cluster.links import ONE, Domain, Factor, Factors, Link, Network, Nic, Switch, Trunk
from shardwise.cluster.names import expand
from shardwise.errors import ClusterError, did_you_mean

T = TypeVar("T")

FORMAT_VERSION = 2
GIB = str(2**30)
DEVICE_FIELDS = (
    "preset",
    "kind",
    "memory_gib",
    "reserved_gib",
    "matmul_flops_per_s",
    "attention_flops_per_s",
    "memory_bytes_per_s",
    "overhead_s",
    "host_bytes_per_s",
    "host_memory_gib",
    "price_per_hour",
    "overlap_loss",
    "speed",
)
LINK_FIELDS = (
    "bandwidth_gb_per_s",
    "latency_us",
    "bus_gb_per_s",
    "efficiency",
    "collectives",
    "shared",
    "message_us",
)
NETWORK_FIELDS = ("latency_us", "message_us", "collectives", "domains", "switches", "trunks")


def read(text: str, file: str) -> Cluster:
    """The cluster that `text` describes."""
    whole = parse(text, file)
    known = ("version", "name", "port", "start", "devices", "nodes", "network")
    if whole.is_mapping:
        version = whole.pairs().get("version")
        if version is None or version.text() != str(FORMAT_VERSION):
            shown = None if version is None else version.text()
            (version or whole).fail(
                f"cluster format version {shown}, this is {FORMAT_VERSION}",
                hint=f"version: {FORMAT_VERSION}",
            )
    top = whole.fields(known, ("version", "devices", "nodes"))
    devices = {name: read_device(entry, name) for name, entry in top["devices"].pairs().items()}
    make = partial(
        Cluster,
        name=top["name"].text() if "name" in top else "cluster",
        nodes=tuple(_node(entry, devices) for entry in top["nodes"].items()),
        network=read_network(top["network"]) if "network" in top else Network(),
        port=_port(top["port"]) if "port" in top else DEFAULT_PORT,
        start=_start(top["start"]) if "start" in top else AS_HERE,
    )
    try:
        return make()
    except ClusterError as error:
        place = whole.at(error.part).about(error.where)
        raise ClusterError(error.message, where=place, hint=error.hint) from None


def read_device(entry: Entry, name: str) -> Device:
    """One kind of device; with `preset`, what is not said is the preset's."""
    found = entry.fields(DEVICE_FIELDS)
    given = _device_fields(found)
    if "preset" in found:
        from shardwise.cluster.presets import preset_device

        base = _located(found["preset"], preset_device, found["preset"].text())
        return _located(entry, partial(replace, base, name=name), **given)
    entry.fields(DEVICE_FIELDS, ("kind", "memory_gib", "matmul_flops_per_s", "memory_bytes_per_s"))
    return _located(entry, Device, name=name, **given)


def _device_fields(found: dict[str, Entry]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, entry in found.items():
        if name == "kind":
            given[name] = entry.text()
        elif name.endswith("_gib"):
            zero = name != "memory_gib"
            given[name.replace("_gib", "_bytes")] = entry.whole(unit=GIB, zero=zero)
        elif name in ("matmul_flops_per_s", "attention_flops_per_s"):
            given[name] = _rates(entry)
        elif name == "memory_bytes_per_s":
            given[name] = _curve(entry)
        elif name != "preset":
            zero = name in ("overhead_s", "price_per_hour", "overlap_loss")
            given[name] = entry.number(zero=zero, infinite=name == "host_bytes_per_s")
    return given


def _rates(entry: Entry) -> Rates:
    return tuple((dtype, _curve(rate)) for dtype, rate in entry.pairs().items())


def _curve(entry: Entry) -> Curve:
    if not entry.is_list:
        return Curve.constant(entry.number())
    points = []
    for item in entry.items():
        pair = item.items()
        if len(pair) != 2:
            item.fail(f"a point has a size and a rate, not {len(pair)} numbers", "[1024, 1.0e12]")
        points.append((pair[0].number(), pair[1].number()))
    return _located(entry, Curve, tuple(points))


def read_link(entry: Entry) -> Link:
    """A link between devices."""
    found = entry.fields(LINK_FIELDS, LINK_FIELDS[:2])
    return _located(
        entry,
        Link,
        bandwidth_bytes_per_s=found["bandwidth_gb_per_s"].number("1e9"),
        latency_s=found["latency_us"].number("1e-6", zero=True),
        bus_bytes_per_s=found["bus_gb_per_s"].number("1e9", infinite=True)
        if "bus_gb_per_s" in found
        else math.inf,
        efficiency=found["efficiency"].number() if "efficiency" in found else 1.0,
        collectives=_factors(found.get("collectives")),
        shared=_factors(found.get("shared")),
        message_s=_message(found),
    )


def _factors(entry: Entry | None) -> Factors:
    """`all_gather: 1.2`, or as measured: `[{ranks: 2, latency: 3, bytes: [[65536, 1.1]]}]`."""
    if entry is None:
        return ()
    found = []
    for name, value in entry.pairs().items():
        items = value.items() if value.is_list else [value]
        found.append((name, tuple(_factor(item) for item in items)))
    return tuple(found)


def _factor(entry: Entry) -> Factor:
    if not entry.is_mapping:
        return Factor(latency=entry.number(), bytes=Curve.constant(entry.number()))
    parts = entry.fields(("ranks", "latency", "bytes"))
    return Factor(
        ranks=parts["ranks"].whole() if "ranks" in parts else 0,
        latency=parts["latency"].number() if "latency" in parts else 1.0,
        bytes=_curve(parts["bytes"]) if "bytes" in parts else ONE,
    )


def read_nic(entry: Entry) -> Nic:
    """The network cards of a node."""
    known = ("count", "bandwidth_gbit_per_s", "latency_us", "efficiency")
    found = entry.fields(known, ("bandwidth_gbit_per_s",))
    return _located(
        entry,
        Nic,
        count=found["count"].whole() if "count" in found else 1,
        bandwidth_bytes_per_s=found["bandwidth_gbit_per_s"].number("125e6"),
        latency_s=_latency(found),
        efficiency=found["efficiency"].number() if "efficiency" in found else 1.0,
    )


def _latency(found: dict[str, Entry]) -> float:
    return found["latency_us"].number("1e-6", zero=True) if "latency_us" in found else 0.0


def _message(found: dict[str, Entry]) -> float:
    return found["message_us"].number("1e-6", zero=True) if "message_us" in found else 0.0


def _node(entry: Entry, devices: dict[str, Device]) -> ClusterNode:
    known = ("name", "devices", "link", "nic", "address", "ssh", "start")
    found = entry.fields(known, ("name", "devices"))
    return _located(
        entry,
        ClusterNode,
        name=_range(found["name"]),
        devices=_devices(found["devices"], devices),
        link=read_link(found["link"]) if "link" in found else None,
        nic=read_nic(found["nic"]) if "nic" in found else None,
        address=_range(found["address"]) if "address" in found else "",
        ssh=_ssh(found["ssh"]) if "ssh" in found else None,
        start=_start(found["start"]) if "start" in found else AS_HERE,
    )


def _devices(entry: Entry, known: dict[str, Device]) -> tuple[Device, ...]:
    """`{h100: 8}`, or a list of names and of `{device: h100, count: 2, speed: 0.5}`."""
    if entry.is_mapping:
        pairs = entry.pairs().items()
        return tuple(d for name, n in pairs for d in (_named(n, name, known),) * n.whole())
    found: list[Device] = []
    for item in entry.items():
        if not item.is_mapping:
            found.append(_named(item, item.text(), known))
            continue
        parts = item.fields(("device", "count", *DEVICE_FIELDS[1:]), ("device",))
        base = _named(item, parts.pop("device").text(), known)
        number = parts.pop("count").whole() if "count" in parts else 1
        found += [_located(item, partial(replace, base), **_device_fields(parts))] * number
    return tuple(found)


def _named(entry: Entry, name: str, known: dict[str, Device]) -> Device:
    if name not in known:
        entry.fail(f"no device {name!r}{did_you_mean(name, known)}", hint=", ".join(known))
    return known[name]


def _ssh(entry: Entry) -> Ssh:
    found = entry.fields(tuple(field.name for field in fields(Ssh)))
    return _located(
        entry,
        Ssh,
        user=found["user"].text() if "user" in found else "",
        key=found["key"].text() if "key" in found else "",
        port=_port(found["port"]) if "port" in found else SSH_PORT,
        program=found["program"].text() if "program" in found else SSH_PROGRAM,
        options=found["options"].texts() if "options" in found else (),
    )


def _start(entry: Entry) -> Start:
    found = entry.fields(tuple(field.name for field in fields(Start)))
    environment = found["environment"].pairs() if "environment" in found else {}
    return _located(
        entry,
        Start,
        folder=found["folder"].text() if "folder" in found else "",
        python=found["python"].text() if "python" in found else "",
        environment=tuple((name, value.text()) for name, value in environment.items()),
    )


def read_network(entry: Entry) -> Network:
    """What lies between nodes."""
    found = entry.fields(NETWORK_FIELDS)
    return _located(
        entry,
        Network,
        latency_s=_latency(found),
        message_s=_message(found),
        collectives=_factors(found.get("collectives")),
        domains=tuple(map(_domain, found["domains"].items())) if "domains" in found else (),
        switches=tuple(map(_switch, found["switches"].items())) if "switches" in found else (),
        trunks=tuple(map(_trunk, found["trunks"].items())) if "trunks" in found else (),
    )


def _domain(entry: Entry) -> Domain:
    found = entry.fields(("nodes", "every", "link"), ("nodes", "link"))
    return Domain(
        nodes=_ranges(found["nodes"]),
        every=found["every"].whole() if "every" in found else 0,
        link=read_link(found["link"]),
    )


def _switch(entry: Entry) -> Switch:
    known = ("name", "nodes", "every", "uplink_gbit_per_s", "oversubscription", "latency_us")
    found = entry.fields(known, ("name", "nodes"))
    uplink, over = found.get("uplink_gbit_per_s"), found.get("oversubscription")
    return _located(
        entry,
        Switch,
        name=found["name"].text(),
        nodes=_ranges(found["nodes"]),
        every=found["every"].whole() if "every" in found else 0,
        uplink_bytes_per_s=uplink.number("125e6") if uplink else None,
        oversubscription=over.number() if over else 1.0,
        latency_s=_latency(found),
    )


def _trunk(entry: Entry) -> Trunk:
    known = ("name", "between", "bandwidth_gbit_per_s", "latency_us")
    found = entry.fields(known, known[:3])
    ends = found["between"].items()
    if len(ends) != 2:
        found["between"].fail(f"a trunk has 2 ends, not {len(ends)}", "between: [a[0-7], b[0-7]]")
    return _located(
        entry,
        Trunk,
        name=found["name"].text(),
        between=(_ranges(ends[0]), _ranges(ends[1])),
        bandwidth_bytes_per_s=found["bandwidth_gbit_per_s"].number("125e6"),
        latency_s=_latency(found),
    )


def _port(entry: Entry) -> int:
    port = entry.whole()
    _located(entry, require_port, port)
    return port


def _range(entry: Entry) -> str:
    """A name, or a range of names."""
    pattern = entry.text()
    _located(entry, expand, pattern)
    return pattern


def _ranges(entry: Entry) -> tuple[str, ...]:
    return tuple(map(_range, entry.items() if entry.is_list else [entry]))


def _located(entry: Entry, make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `make`; what it refuses is said of this place."""
    try:
        return make(*args, **kwargs)
    except ClusterError as error:
        raise ClusterError(error.message, where=entry.where, hint=error.hint) from None
