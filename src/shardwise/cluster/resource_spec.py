"""Read AutoDist's `resource_spec.yml` as a cluster.

It lists addresses, GPUs or CPUs, the bandwidth of each node's network card in Gbit/s, and ssh
settings. It does not say which GPUs these are: they are taken for V100s of 16 GB, until the saved
cluster file is edited.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from shardwise.cluster.cluster import Cluster, ClusterNode, Ssh, Start
from shardwise.schema import Range, Reader

GPU = "v100-16"
CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecNode:
    """A node of the file; with neither GPUs nor CPUs it has one rank on its CPU."""

    address: str
    gpus: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    chief: str = "false"
    ssh_config: str = ""
    network_bandwidth: Annotated[float, Range(0, above=True)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecSsh:
    """Settings of ssh, by name."""

    username: str = ""
    port: Annotated[int, Range(1, 2**16 - 1)] = 22
    key_file: str = ""
    python_venv: str = ""
    shared_envs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSpec:
    """The fields of the file."""

    nodes: tuple[SpecNode, ...]
    ssh: Mapping[str, SpecSsh] = field(default_factory=dict)


def is_resource_spec(value: Any) -> bool:
    """Return whether a parsed YAML file is one of AutoDist's."""
    is_mapping = isinstance(value, Mapping) and value.keys() <= {"nodes", "ssh"}
    nodes = value.get("nodes") if is_mapping else None
    return isinstance(nodes, list) and any(isinstance(n, Mapping) and "address" in n for n in nodes)


def read_resource_spec(reader: Reader, value: Any) -> Cluster:
    """Return the cluster of a parsed file, the chief first: ranks rendezvous there."""
    spec = reader.construct(ResourceSpec, (), **reader.fields(ResourceSpec, value))
    for index, node in enumerate(spec.nodes):
        if node.ssh_config and node.ssh_config not in spec.ssh:
            reader.fail(
                f"no ssh settings {node.ssh_config!r}",
                ("nodes", index, "ssh_config"),
                hint=", ".join(spec.ssh) or "a section ssh",
            )
    ordered = sorted(spec.nodes, key=lambda node: node.chief.lower() not in ("true", "yes", "on"))
    nodes = tuple(_node(node, spec.ssh) for node in ordered)
    return reader.construct(Cluster, ("nodes",), name="resource_spec", nodes=nodes)


def _node(node: SpecNode, settings: Mapping[str, SpecSsh]) -> ClusterNode:
    kind, count = (GPU, len(node.gpus)) if node.gpus else (CPU, max(1, len(node.cpus)))
    cluster = Cluster.preset(kind, devices_per_node=count, nic_gbit_per_s=node.network_bandwidth)
    made = replace(cluster.nodes[0], name=node.address, address=node.address)
    if not node.ssh_config:
        return made
    ssh = settings[node.ssh_config]
    python = f"{ssh.python_venv}/bin/python" if ssh.python_venv else ""
    return replace(
        made,
        ssh=Ssh(user=ssh.username, key=ssh.key_file, port=ssh.port),
        start=Start(python=python, environment=tuple(ssh.shared_envs.items())),
    )
