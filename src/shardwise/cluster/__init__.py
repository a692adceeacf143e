"""The machines a plan is for, and the mesh of named axes its ranks form."""

from shardwise.cluster.cluster import Cluster, ClusterNode, Device, Link
from shardwise.cluster.mesh import Mesh

__all__ = ["Cluster", "ClusterNode", "Device", "Link", "Mesh"]
