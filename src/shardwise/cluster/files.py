"""Read and write cluster files: YAML text to `Cluster` and back.

A round trip preserves the cluster. The text has one canonical form, from which the fingerprint is
computed. `docs/guides/clusters.md` describes every field. Numbers are read as decimals, so that
converting units loses no digits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import yaml

from shardwise.cluster.cluster import (
    DEFAULT_PORT,
    DEFAULT_START,
    Cluster,
    ClusterNode,
    NodeDevices,
    Port,
    Start,
)
from shardwise.cluster.device import Curve, Device
from shardwise.cluster.links import MAX_COUNT, Factor, Network
from shardwise.cluster.resource_spec import is_resource_spec, read_resource_spec
from shardwise.errors import ClusterError, did_you_mean
from shardwise.schema import KeyPath, Range, Reader, Writer, parse_yaml

FORMAT_VERSION = 2
MAX_VALUES = 500_000  # in a cluster file

Rate = Annotated[float, Range(0, above=True)]
Count = Annotated[int, Range(1, MAX_COUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """The fields of a cluster file; devices may be based on presets."""

    version: int
    name: str = "cluster"
    port: Port = DEFAULT_PORT
    start: Start = DEFAULT_START
    devices: Mapping[str, Device]
    nodes: tuple[ClusterNode, ...]
    network: Network = field(default_factory=Network)


# ------------------------------------------------------------ reading
def from_yaml(text: str, file: str) -> Cluster:
    """Return the cluster that `text` describes, also in AutoDist's format."""
    reader, value = open_reader(text, file)
    if value is None:
        raise ClusterError("the file is empty", where=file, hint="shardwise profile -o FILE")
    if is_resource_spec(value):
        return read_resource_spec(reader, value)
    version = value.get("version") if isinstance(value, Mapping) else str(FORMAT_VERSION)
    if version != str(FORMAT_VERSION):
        reader.fail(
            f"cluster format version {version}, expected {FORMAT_VERSION}",
            ("version",) if version else (),
            hint=f"version: {FORMAT_VERSION}",
        )
    fields = reader.fields(ClusterFile, value)
    del fields["version"], fields["devices"]
    return reader.construct(Cluster, (), **{"name": "cluster", **fields})


def open_reader(text: str, file: str) -> tuple[Reader, Any]:
    """Parse a text in the format of cluster files; return a reader of its parts, and the value."""
    value, lines = parse_yaml(text, ClusterError, where=file, max_values=MAX_VALUES, typed=False)
    devices: dict[str, Device] = {}
    hooks: dict[Any, Any] = {
        Curve: _read_curve,
        tuple[Factor, ...]: _read_factors,
        Mapping[str, Device]: partial(_read_devices, devices),
        NodeDevices: partial(_read_node_devices, devices),
    }
    return Reader(ClusterError, file, lines, decimals=True, hooks=hooks), value


def read_device(reader: Reader, value: Any, path: KeyPath, name: str) -> Device:
    """Return a kind of device; missing fields are those of its `preset`."""
    if not isinstance(value, Mapping) or value.get("preset") is None:
        return reader.construct(Device, path, name=name, **reader.fields(Device, value, path))
    from shardwise.cluster.presets import preset_device

    inner = (*path, "preset")
    base = reader.construct(preset_device, inner, reader.read(str, value["preset"], inner))
    return _override(reader, base, value, path, "preset", name=name)


def _override(
    reader: Reader, base: Device, value: Mapping[str, Any], path: KeyPath, *omit: str, **more: str
) -> Device:
    overrides = {name: item for name, item in value.items() if name not in omit}
    fields = reader.fields(Device, overrides, path, required=False)
    return reader.construct(partial(replace, base), path, **fields, **more)


def _read_devices(
    devices: dict[str, Device], reader: Reader, value: Any, path: KeyPath
) -> Mapping[str, Device]:
    for name, item in reader.read(Mapping[str, Any], value, path).items():
        devices[name] = read_device(reader, item, (*path, name), name)
    return devices


def _read_node_devices(
    devices: Mapping[str, Device], reader: Reader, value: Any, path: KeyPath
) -> tuple[Device, ...]:
    """Read `{h100: 8}`, or a list of names and of `{device: h100, count: 2, speed: 0.5}`."""

    def named(name: str, path: KeyPath) -> Device:
        if name not in devices:
            message = f"no device {name!r}{did_you_mean(name, devices)}"
            reader.fail(message, path, ", ".join(devices))
        return devices[name]

    if isinstance(value, Mapping):
        counts = ((name, reader.read(Count, n, (*path, name))) for name, n in value.items())
        return tuple(d for name, n in counts for d in (named(name, (*path, name)),) * n)
    result: list[Device] = []
    for index, item in enumerate(reader.read(tuple[Any, ...], value, path)):
        inner = (*path, index)
        if not isinstance(item, Mapping):
            result.append(named(reader.read(str, item, inner), inner))
            continue
        if item.get("device") is None:
            reader.fail("field 'device' is missing", inner, hint="device: …")
        base = named(reader.read(str, item["device"], (*inner, "device")), inner)
        number = reader.read(Count, item.get("count") or "1", (*inner, "count"))
        result += [_override(reader, base, item, inner, "device", "count")] * number
    return tuple(result)


def _read_curve(reader: Reader, value: Any, path: KeyPath) -> Curve:
    """Read a number, or a list of points `[size, rate]`."""
    if not isinstance(value, list):
        return Curve.constant(reader.read(Rate, value, path))
    points = reader.read(tuple[tuple[Rate, Rate], ...], value, path)
    return reader.construct(Curve, path, points)


def _read_factors(reader: Reader, value: Any, path: KeyPath) -> tuple[Factor, ...]:
    """Read `1.2`, or as measured: `[{ranks: 2, latency: 3, bytes: [[65536, 1.1]]}]`."""
    if not isinstance(value, list):
        return (_read_factor(reader, value, path),)
    return tuple(_read_factor(reader, item, (*path, i)) for i, item in enumerate(value))


def _read_factor(reader: Reader, value: Any, path: KeyPath) -> Factor:
    if isinstance(value, Mapping):
        factor: Factor = reader.read(Factor, value, path)
        return factor
    number = reader.read(Rate, value, path)
    return Factor(latency=number, bytes=Curve.constant(number))


# ------------------------------------------------------------ writing
class _Number(str):
    """The digits of a number, to be written without quotes."""


class _Flow(list[Any]):
    """A list to be written on one line."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_number(dumper: yaml.SafeDumper, value: _Number) -> yaml.Node:
    kind = "float" if any(c in value for c in ".eEn") else "int"
    return dumper.represent_scalar(f"tag:yaml.org,2002:{kind}", str(value))


def _write_flow(dumper: yaml.SafeDumper, value: _Flow) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(_Number, _write_number)
_Dumper.add_representer(_Flow, _write_flow)


def to_yaml(cluster: Cluster) -> str:
    """Return the text of a cluster file."""
    bases: dict[str, Device] = {}  # the first device of every name; others list their differences
    for device in (device for node in cluster.nodes for device in node.devices):
        bases.setdefault(device.name, device)
    document = _WRITER.fields(
        ClusterFile(
            version=FORMAT_VERSION,
            name=cluster.name,
            port=cluster.port,
            start=cluster.start,
            devices=bases,
            nodes=cluster.nodes,
            network=cluster.network,
        )
    )
    document = {"version": FORMAT_VERSION, "name": cluster.name, **document}
    for node, written in zip(cluster.nodes, document["nodes"], strict=True):
        written["devices"] = _node_devices(node, document["devices"])
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def format_number(value: float, unit: str = "1") -> _Number | int:
    """Return `value` in its unit, without loss."""
    if isinstance(value, int) and unit == "1":
        return value
    if value == math.inf:
        return _Number(".inf")
    scaled = (Decimal(repr(value)) / Decimal(unit)).normalize()
    if Decimal("1e-4") <= scaled < Decimal("1e6") or scaled == 0:
        return _Number(f"{scaled:f}")
    mantissa, _, exponent = f"{scaled:e}".lower().partition("e")
    return _Number(f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}")


def _write_curve(curve: Curve) -> Any:
    if curve.is_constant:
        return format_number(float(curve.best))
    return _Flow(
        _Flow([format_number(float(size)), format_number(float(rate))])
        for size, rate in curve.points
    )


_WRITER = Writer(format_number, {Curve: _write_curve})


def _node_devices(node: ClusterNode, bases: Mapping[str, Mapping[str, Any]]) -> Any:
    runs = [(device, len(list(run))) for device, run in groupby(node.devices)]
    written = [
        {"device": device.name, "count": n}
        | {k: v for k, v in _WRITER.fields(device).items() if v != bases[device.name][k]}
        for device, n in runs
    ]
    if all(len(item) == 2 for item in written) and len({d.name for d, _ in runs}) == len(runs):
        return {device.name: n for device, n in runs}
    return written
