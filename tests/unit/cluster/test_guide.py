from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.cluster import Cluster, Device, Link, preset_names
from shardwise.errors import ClusterError
from shardwise.schema import _fields_of as field_names

GUIDE = (Path(__file__).parents[3] / "docs/guides/clusters.md").read_text()
EXAMPLE = re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)[0]


def test_the_example_is_a_cluster_of_unequal_nodes() -> None:
    cluster = Cluster.from_yaml(EXAMPLE)
    assert cluster.num_ranks == 6
    assert [cluster.device(rank).name for rank in (3, 4)] == ["h100", "old"]
    assert cluster.device(5).speed == 0.5
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


def test_the_error_of_the_guide_is_the_error_raised() -> None:
    wrong = EXAMPLE.replace("{bandwidth_gb_per_s: 450", "{bandwith_gb_per_s: 450")
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(wrong, "cluster.yaml")
    assert f"ClusterError: {caught.value}\n" in GUIDE


@pytest.mark.parametrize(
    "name", ["preset", *field_names(Device), *field_names(Link), *preset_names()]
)
def test_every_field_and_preset_is_described(name: str) -> None:
    assert f"`{name}`" in GUIDE
