"""Describe clusters and their networks, and meshes of named axes over their ranks."""

from shardwise.cluster.cluster import Cluster, ClusterNode, Ssh, Start
from shardwise.cluster.device import Curve, Device
from shardwise.cluster.links import Domain, Factor, Link, Network, Nic, Switch, Trunk
from shardwise.cluster.mesh import Mesh
from shardwise.cluster.presets import preset_device, preset_names
from shardwise.cluster.topology import Topology
