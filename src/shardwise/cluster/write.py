"""Writing a cluster file, so that reading it gives the same cluster.

Enters: `Cluster`. Leaves: YAML text in one fixed form, which the fingerprint is made of.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import yaml

from shardwise.cluster.cluster import AS_HERE, SSH_PROGRAM, Ssh, Start
from shardwise.cluster.device import Curve, Device, Rates
from shardwise.cluster.links import Domain, Factors, Link, Network, Nic, Switch, Trunk
from shardwise.cluster.read import FORMAT_VERSION, GIB

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster, ClusterNode


class _Number(str):
    """A number as it is to be written."""


class _Flow(list[Any]):
    """A list on one line."""


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
    """The file's text."""
    bases = _bases(cluster)
    document = {
        "version": FORMAT_VERSION,
        "name": cluster.name,
        "port": cluster.port,
        "start": _start(cluster.start),
        "devices": bases,
        "nodes": [_node(node, bases) for node in cluster.nodes],
        "network": _network(cluster.network),
    }
    for name in ("start", "network"):
        if not document[name]:
            del document[name]
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _bases(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The fields of the first device of every name; others of the name say how they differ."""
    found: dict[str, Device] = {}
    for node in cluster.nodes:
        for device in node.devices:
            found.setdefault(device.name, device)
    return {name: _device(device) for name, device in found.items()}


def number(value: float, unit: str = "1") -> _Number:
    """`value` in its unit, without loss."""
    if value == math.inf:
        return _Number(".inf")
    scaled = (Decimal(repr(value)) / Decimal(unit)).normalize()
    if Decimal("1e-4") <= scaled < Decimal("1e6") or scaled == 0:
        return _Number(f"{scaled:f}")
    mantissa, _, exponent = f"{scaled:e}".lower().partition("e")
    return _Number(f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}")


def _optional(**values: tuple[Any, Any, Any]) -> dict[str, Any]:
    """`name=(value, default, text)`: those that differ from their defaults."""
    return {name: text for name, (value, default, text) in values.items() if value != default}


def _device(device: Device) -> dict[str, Any]:
    return {
        "kind": device.kind,
        "memory_gib": number(device.memory_bytes, GIB),
        "reserved_gib": number(device.reserved_bytes, GIB),
        "matmul_flops_per_s": _rates(device.matmul_flops_per_s),
        "attention_flops_per_s": _rates(device.attention_flops_per_s),
        "memory_bytes_per_s": _curve(device.memory_bytes_per_s),
        "overhead_s": number(device.overhead_s),
        "host_bytes_per_s": number(device.host_bytes_per_s),
        "host_memory_gib": number(device.host_memory_bytes, GIB),
        "price_per_hour": number(device.price_per_hour),
        "overlap_loss": number(device.overlap_loss),
        "speed": number(device.speed),
    }


def _rates(rates: Rates) -> dict[str, Any]:
    return {dtype: _curve(curve) for dtype, curve in rates}


def _curve(curve: Curve) -> Any:
    if curve.is_constant:
        return number(curve.best)
    return _Flow(_Flow([number(size), number(rate)]) for size, rate in curve.points)


def _node(node: ClusterNode, bases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": node.name, "devices": _node_devices(node, bases)}
    if node.link is not None:
        found["link"] = _link(node.link)
    if node.nic is not None:
        found["nic"] = _nic(node.nic)
    if node.address:
        found["address"] = node.address
    if node.ssh is not None:
        found["ssh"] = _ssh(node.ssh)
    if node.start != AS_HERE:
        found["start"] = _start(node.start)
    return found


def _ssh(ssh: Ssh) -> dict[str, Any]:
    return {
        "user": ssh.user,
        "key": ssh.key,
        "port": ssh.port,
        **_optional(
            program=(ssh.program, SSH_PROGRAM, ssh.program),
            options=(ssh.options, (), list(ssh.options)),
        ),
    }


def _start(start: Start) -> dict[str, Any]:
    return _optional(
        folder=(start.folder, "", start.folder),
        python=(start.python, "", start.python),
        environment=(start.environment, (), dict(start.environment)),
    )


def _node_devices(node: ClusterNode, bases: dict[str, dict[str, Any]]) -> Any:
    runs: list[tuple[Device, int]] = []
    for device in node.devices:
        if runs and runs[-1][0] == device:
            runs[-1] = (device, runs[-1][1] + 1)
        else:
            runs.append((device, 1))
    written = [
        {"device": device.name, "count": n} | _differing(device, bases) for device, n in runs
    ]
    if all(len(item) == 2 for item in written) and len({d.name for d, _ in runs}) == len(runs):
        return {device.name: n for device, n in runs}
    return written


def _differing(device: Device, bases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    base = bases[device.name]
    return {name: value for name, value in _device(device).items() if value != base[name]}


def _link(link: Link) -> dict[str, Any]:
    bus = number(link.bus_bytes_per_s, "1e9")
    return {
        "bandwidth_gb_per_s": number(link.bandwidth_bytes_per_s, "1e9"),
        "latency_us": number(link.latency_s, "1e-6"),
        **_optional(
            bus_gb_per_s=(link.bus_bytes_per_s, math.inf, bus),
            efficiency=(link.efficiency, 1.0, number(link.efficiency)),
            collectives=(link.collectives, (), _factors(link.collectives)),
            shared=(link.shared, (), _factors(link.shared)),
            message_us=(link.message_s, 0.0, number(link.message_s, "1e-6")),
        ),
    }


def _factors(factors: Factors) -> dict[str, Any]:
    return {
        name: [
            {
                **_optional(ranks=(factor.ranks, 0, factor.ranks)),
                "latency": number(factor.latency),
                "bytes": _curve(factor.bytes),
            }
            for factor in known
        ]
        for name, known in factors
    }


def _nic(nic: Nic) -> dict[str, Any]:
    return {
        "count": nic.count,
        "bandwidth_gbit_per_s": number(nic.bandwidth_bytes_per_s, "125e6"),
        "latency_us": number(nic.latency_s, "1e-6"),
        **_optional(efficiency=(nic.efficiency, 1.0, number(nic.efficiency))),
    }


def _network(network: Network) -> dict[str, Any]:
    return _optional(
        latency_us=(network.latency_s, 0.0, number(network.latency_s, "1e-6")),
        message_us=(network.message_s, 0.0, number(network.message_s, "1e-6")),
        collectives=(network.collectives, (), _factors(network.collectives)),
        domains=(network.domains, (), [_domain(domain) for domain in network.domains]),
        switches=(network.switches, (), [_switch(switch) for switch in network.switches]),
        trunks=(network.trunks, (), [_trunk(trunk) for trunk in network.trunks]),
    )


def _domain(domain: Domain) -> dict[str, Any]:
    every = _optional(every=(domain.every, 0, domain.every))
    return {"nodes": _names(domain.nodes), **every, "link": _link(domain.link)}


def _switch(switch: Switch) -> dict[str, Any]:
    uplink = switch.uplink_bytes_per_s
    return {
        "name": switch.name,
        "nodes": _names(switch.nodes),
        **_optional(
            every=(switch.every, 0, switch.every),
            uplink_gbit_per_s=(uplink, None, None if uplink is None else number(uplink, "125e6")),
            oversubscription=(switch.oversubscription, 1.0, number(switch.oversubscription)),
            latency_us=(switch.latency_s, 0.0, number(switch.latency_s, "1e-6")),
        ),
    }


def _trunk(trunk: Trunk) -> dict[str, Any]:
    return {
        "name": trunk.name,
        "between": [_names(side) for side in trunk.between],
        "bandwidth_gbit_per_s": number(trunk.bandwidth_bytes_per_s, "125e6"),
        "latency_us": number(trunk.latency_s, "1e-6"),
    }


def _names(names: tuple[str, ...]) -> Any:
    return names[0] if len(names) == 1 else list(names)
