"""Build clusters of equal nodes of a known kind, by name or from a text such as `h100:8x8`.

The figures and their sources are in `presets.yaml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.device import Device
from shardwise.cluster.files import open_reader, read_device
from shardwise.cluster.links import Link, Network, Nic
from shardwise.errors import ClusterError, did_you_mean
from shardwise.schema import ONE_OR_MORE

FORMS = "a file such as cluster.yaml, or h100:8x8 (8 nodes of 8), h100:16, h100, cpu:4"
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A common kind of node: its devices, and the links inside and between nodes."""

    device: Device
    devices_per_node: int
    link: Link
    nic: Nic
    network: Network = field(default_factory=Network)
    domain_devices: int = 0  # devices that one link connects across nodes
    aliases: Annotated[tuple[str, ...], ONE_OR_MORE] = ()


def preset_device(kind: str) -> Device:
    """Return the device of a known kind."""
    return find_preset(kind).device


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, without aliases."""
    return tuple(_presets())


def find_preset(kind: str) -> Preset:
    """Return the preset of a kind."""
    presets = {alias: p for name, p in _presets().items() for alias in (name, *p.aliases)}
    if kind.lower() not in presets:
        raise ClusterError(
            f"no preset {kind!r}{did_you_mean(kind, presets)}", hint=", ".join(_presets())
        )
    return presets[kind.lower()]


@cache
def _presets() -> dict[str, Preset]:
    text = resources.files("shardwise.cluster").joinpath("presets.yaml").read_text("utf-8")
    reader, value = open_reader(text, "presets.yaml")

    def read(name: str, item: Mapping[str, Any]) -> Preset:
        others = {key: inner for key, inner in item.items() if key != "device"}
        fields = reader.fields(Preset, others, (name,), required=False)
        device = read_device(reader, item["device"], (name, "device"), name)
        return Preset(device=device, **fields)

    return {name: read(name, item) for name, item in value.items()}


# ------------------------------------------------------------ clusters as text
def parse_cluster(text: str) -> Cluster:
    """Return the cluster in a file, or equal nodes of a known kind such as `h100:8x8`."""
    path = Path(text)
    if path.suffix in SUFFIXES or path.is_file() or "/" in text:
        return Cluster.load(path)
    kind, colon, sizes = text.partition(":")
    nodes, devices = _parse_sizes(sizes, text) if colon else (1, None)
    if kind == "local":
        return Cluster.local((nodes or 1) * (devices or 1))
    try:
        if nodes is None:
            assert devices is not None
            return preset_of_size(kind, devices)
        return Cluster.preset(kind, nodes=nodes, devices_per_node=devices)
    except ClusterError as error:
        if "no preset" not in error.message:
            raise
        message = f"{text!r} is not a file, and there is {error.message}"
        raise ClusterError(message, hint=f"{FORMS}; kinds: {', '.join(preset_names())}") from None


def preset_of_size(kind: str, count: int) -> Cluster:
    """Return `count` devices of a known kind, in as few equal nodes as its usual size allows.

    CPU cores are in one node, however many.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(f"{count!r} devices of {kind}, must be at least 1")
    base = find_preset(kind)
    max_per_node = count if base.device.kind == "cpu" else base.devices_per_node
    per_node = max(size for size in range(1, min(max_per_node, count) + 1) if count % size == 0)
    return Cluster.preset(kind, nodes=count // per_node, devices_per_node=per_node)


def _parse_sizes(sizes: str, text: str) -> tuple[int | None, int | None]:
    """Return the nodes and devices per node of `8x4`, or None and the devices of `16`."""
    nodes, cross, per_node = sizes.partition("x")
    valid = nodes.isdigit() and (not cross or per_node.isdigit())
    if not valid or 0 in map(int, (nodes, per_node or 1)):
        raise ClusterError(f"{text!r} does not have valid sizes of a cluster", hint=FORMS)
    return (int(nodes), int(per_node)) if cross else (None, int(nodes))
