"""Known kinds of machines.

Enters: a kind and how many. Leaves: a `Cluster` of equal nodes. All figures are in
`presets.yaml`, with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from shardwise.cluster.cluster import Cluster, ClusterNode
from shardwise.cluster.device import Device
from shardwise.cluster.entries import parse
from shardwise.cluster.links import Domain, Link, Network, Nic, Switch
from shardwise.cluster.read import read_device, read_link, read_network, read_nic
from shardwise.errors import ClusterError, did_you_mean

_GBIT = 125e6  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A usual machine: its device, how many, and what connects them."""

    device: Device
    devices_per_node: int
    link: Link
    nic: Nic
    network: Network
    domain_devices: int = 0  # of a link that reaches over several nodes
    aliases: tuple[str, ...] = ()


def preset(
    kind: str,
    *,
    nodes: int = 1,
    devices_per_node: int | None = None,
    nic_gbit_per_s: float | None = None,
    network_latency_us: float | None = None,
    oversubscription: float = 1.0,
) -> Cluster:
    """Equal nodes of a known kind; see `Cluster.preset`."""
    found = _find(kind)
    per_node = found.devices_per_node if devices_per_node is None else devices_per_node
    for name, value in (("nodes", nodes), ("devices_per_node", per_node)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ClusterError(
                f"{name} is {value!r}, must be a whole number of at least 1",
                hint=f'Cluster.preset("{kind}", nodes=2, devices_per_node=8)',
            )
    names = "node0" if nodes == 1 else f"node[0-{nodes - 1}]"
    network = found.network
    if network_latency_us is not None:
        network = replace(network, latency_s=network_latency_us * 1e-6)
    if oversubscription != 1:
        switch = Switch(name="leaf", nodes=(names,), every=1, oversubscription=oversubscription)
        network = replace(network, switches=(switch,))
    link: Link | None = found.link
    if found.domain_devices > per_node and nodes > 1:
        every = max(1, found.domain_devices // per_node)
        domain = Domain(nodes=(names,), every=min(every, nodes), link=found.link)
        network, link = replace(network, domains=(domain,)), None
    node = ClusterNode(
        name=names,
        devices=(found.device,) * per_node,
        link=link,
        nic=_cards(found, per_node, nic_gbit_per_s),
    )
    return Cluster(name=f"{kind}-{nodes * per_node}", nodes=(node,), network=network)


def preset_device(kind: str) -> Device:
    """The device of a known kind."""
    return _find(kind).device


def preset_names() -> tuple[str, ...]:
    """Every kind, without other names for the same."""
    return tuple(_presets())


def _cards(found: Preset, per_node: int, gbit_per_s: float | None) -> Nic:
    """As many cards for each device as a full node has; at least one."""
    count = max(1, round(found.nic.count * per_node / found.devices_per_node))
    if gbit_per_s is None:
        return replace(found.nic, count=count)
    count = min(count, per_node)
    return replace(found.nic, count=count, bandwidth_bytes_per_s=gbit_per_s * _GBIT / count)


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
    found: dict[str, Preset] = {}
    known = ("aliases", "device", "devices_per_node", "link", "nic", "network", "domain_devices")
    for name, entry in parse(text, "presets.yaml").pairs().items():
        parts = entry.fields(known, ("device", "devices_per_node", "link", "nic"))
        found[name] = Preset(
            device=read_device(parts["device"], name),
            devices_per_node=parts["devices_per_node"].whole(),
            link=read_link(parts["link"]),
            nic=read_nic(parts["nic"]),
            network=read_network(parts["network"]) if "network" in parts else Network(),
            domain_devices=parts["domain_devices"].whole() if "domain_devices" in parts else 0,
            aliases=parts["aliases"].texts() if "aliases" in parts else (),
        )
    return found
