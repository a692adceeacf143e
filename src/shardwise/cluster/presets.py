"""Build clusters of equal nodes of a known kind, by name or from a text such as `h100:8x8`.

The figures and their sources are in `presets.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from shardwise.cluster.cluster import Cluster, ClusterNode
from shardwise.cluster.device import Device
from shardwise.cluster.files import open_reader, read_device
from shardwise.cluster.links import Domain, Link, Network, Nic, Switch
from shardwise.errors import ClusterError, did_you_mean
from shardwise.schema import ONE_OR_MORE

_GBIT = 125e6  # bytes
FORMS = "a file such as cluster.yaml, or h100:8x8 (8 nodes of 8), h100:16, h100, cpu:4"
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A common node: its device, how many it has, and what connects them."""

    device: Device
    devices_per_node: int
    link: Link
    nic: Nic
    network: Network = field(default_factory=Network)
    domain_devices: int = 0  # devices that one link connects across nodes
    aliases: Annotated[tuple[str, ...], ONE_OR_MORE] = ()


def preset(
    kind: str,
    *,
    nodes: int = 1,
    devices_per_node: int | None = None,
    nic_gbit_per_s: float | None = None,
    network_latency_us: float | None = None,
    oversubscription: float = 1.0,
) -> Cluster:
    """Return equal nodes of a known kind; see `Cluster.preset`."""
    known = _find(kind)
    per_node = known.devices_per_node if devices_per_node is None else devices_per_node
    for name, value in (("nodes", nodes), ("devices_per_node", per_node)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ClusterError(
                f"{name} is {value!r}, must be an integer of at least 1",
                hint=f'Cluster.preset("{kind}", nodes=2, devices_per_node=8)',
            )
    names = "node0" if nodes == 1 else f"node[0-{nodes - 1}]"
    network = known.network
    if network_latency_us is not None:
        network = replace(network, latency_s=network_latency_us * 1e-6)
    if oversubscription != 1:
        switch = Switch(name="leaf", nodes=(names,), every=1, oversubscription=oversubscription)
        network = replace(network, switches=(switch,))
    link: Link | None = known.link
    if known.domain_devices > per_node and nodes > 1:
        every = max(1, known.domain_devices // per_node)
        domain = Domain(nodes=(names,), every=min(every, nodes), link=known.link)
        network, link = replace(network, domains=(domain,)), None
    node = ClusterNode(
        name=names,
        devices=(known.device,) * per_node,
        link=link,
        nic=_cards(known, per_node, nic_gbit_per_s),
    )
    return Cluster(name=f"{kind}-{nodes * per_node}", nodes=(node,), network=network)


def preset_device(kind: str) -> Device:
    """Return the device of a known kind."""
    return _find(kind).device


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, without aliases."""
    return tuple(_presets())


def _cards(known: Preset, per_node: int, gbit_per_s: float | None) -> Nic:
    """Return the network cards of a node: as many per device as in a full one, at least one."""
    count = max(1, round(known.nic.count * per_node / known.devices_per_node))
    if gbit_per_s is None:
        return replace(known.nic, count=count)
    count = min(count, per_node)
    return replace(known.nic, count=count, bandwidth_bytes_per_s=gbit_per_s * _GBIT / count)


def _find(kind: str) -> Preset:
    known = {other: name for name, p in _presets().items() for other in (name, *p.aliases)}
    name = known.get(kind.lower())
    if name is None:
        raise ClusterError(
            f"no preset {kind!r}{did_you_mean(kind, known)}", hint=", ".join(_presets())
        )
    return _presets()[name]


@cache
def _presets() -> dict[str, Preset]:
    text = resources.files("shardwise.cluster").joinpath("presets.yaml").read_text("utf-8")
    reader, value = open_reader(text, "presets.yaml")

    def read(name: str, item: Mapping[str, Any]) -> Preset:
        rest = {key: inner for key, inner in item.items() if key != "device"}
        given = reader.fields(Preset, rest, (name,), required=False)
        device = read_device(reader, item["device"], (name, "device"), name)
        return Preset(device=device, **given)

    return {name: read(name, item) for name, item in value.items()}


# ------------------------------------------------------------ clusters as text


def parse_cluster(text: str) -> Cluster:
    """Return the cluster in a file, or equal nodes of a known kind such as `h100:8x8`."""
    path = Path(text)
    if path.suffix in SUFFIXES or path.is_file() or "/" in text:
        return Cluster.load(path)
    kind, colon, sizes = text.partition(":")
    nodes, each = _parse_sizes(sizes, text) if colon else (1, None)
    if kind == "local":
        return Cluster.local((nodes or 1) * (each or 1))
    try:
        if nodes is None:
            assert each is not None
            return preset_of_size(kind, each)
        return preset(kind, nodes=nodes, devices_per_node=each)
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
        raise ClusterError(f"{count!r} devices of {kind}", hint="1 or more")
    known = preset(kind)
    usual = count if known.device(0).kind == "cpu" else known.num_ranks
    each = max(size for size in range(1, min(usual, count) + 1) if count % size == 0)
    return preset(kind, nodes=count // each, devices_per_node=each)


def _parse_sizes(sizes: str, text: str) -> tuple[int | None, int | None]:
    """Return nodes and devices of each for `8x4`, or None and all devices for `16`."""
    nodes, cross, each = sizes.partition("x")
    if not nodes.isdigit() or (cross and not each.isdigit()) or 0 in map(int, (nodes, each or 1)):
        raise ClusterError(f"{text!r} has no sizes of a cluster", hint=FORMS)
    return (int(nodes), int(each)) if cross else (None, int(nodes))
