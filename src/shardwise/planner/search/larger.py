"""Other sizes of the same thing: a cluster with copies of its nodes, a batch of fewer rows.

Enters: a `Cluster`, or a `Bank`. Leaves: the same, larger or smaller.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster import Cluster
from shardwise.cluster.links import Network
from shardwise.planner.search.bank import Bank, Layouts
from shardwise.simulation.work import Work
from shardwise.simulation.works import Works


def copied(cluster: Cluster, factor: int) -> Cluster | None:
    """The cluster with `factor` times its nodes; without a network, with so many more devices."""
    name = f"{factor} x {cluster.name}"
    if any(node.nic is None for node in cluster.nodes):
        if cluster.num_nodes > 1:
            return None
        (node,) = cluster.nodes
        if node.link is None:
            return None
        return replace(cluster, name=name, nodes=(replace(node, devices=node.devices * factor),))
    nodes, network = list(cluster.nodes), cluster.network
    for number in range(1, factor):
        nodes += [
            replace(node, name=_renamed(node.name, number), address="", ssh=None)
            for node in cluster.nodes
        ]
        network = _joined(network, cluster.network, number)
    return replace(cluster, name=name, nodes=tuple(nodes), network=network)


def _renamed(name: str, number: int) -> str:
    return f"copy{number}-{name}"


def _joined(network: Network, original: Network, number: int) -> Network:
    """The network with a copy of the original's domains, switches and trunks."""

    def names(patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_renamed(pattern, number) for pattern in patterns)

    return replace(
        network,
        domains=(
            *network.domains,
            *(replace(d, nodes=names(d.nodes)) for d in original.domains),
        ),
        switches=(
            *network.switches,
            *(
                replace(s, name=_renamed(s.name, number), nodes=names(s.nodes))
                for s in original.switches
            ),
        ),
        trunks=(
            *network.trunks,
            *(
                replace(
                    t,
                    name=_renamed(t.name, number),
                    between=(names(t.between[0]), names(t.between[1])),
                )
                for t in original.trunks
            ),
        ),
    )


class Fewer(Bank):
    """The layouts of a bank for a batch of fewer rows."""

    def __init__(self, bank: Bank, rows: int) -> None:
        self.__dict__.update(bank.__dict__)
        self.whole, self.rows = bank, rows
        self._smaller: dict[tuple[int, int], Layouts] = {}

    def get(self, tp: int, layout: int) -> Layouts:
        """The layouts that the whole batch has."""
        key = (tp, layout)
        if key not in self._smaller:
            layouts = self.whole.get(tp, layout)
            self._smaller[key] = replace(layouts, works=_FewerRows(layouts.works, self.rows))
        return self._smaller[key]


class _FewerRows(Works):
    """The work of a rank, of a batch of fewer rows; the same for as many rows of it."""

    def __init__(self, works: Works, rows: int) -> None:
        self.__dict__.update(works.__dict__)
        self.whole = works
        self.rows = rows if works.batch else works.rows

    def at(self, rows: float, *, exact: bool = False) -> Work:
        """The work of a rank whose micro-batch has `rows` of the batch."""
        return self.whole.at(rows, exact=exact)
