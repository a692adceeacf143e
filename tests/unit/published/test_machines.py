"""Device labels and texts about links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cost.collectives import collective_model
from shardwise.published.machines import cluster_of, read_device, read_machine
from shardwise.published.rows import Unusable
from tests.unit.published.test_models import ROW


@pytest.mark.parametrize(
    ("label", "preset"),
    [
        ("V100 (DGX-2)", "v100"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("A100-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("a100 80 gb", "a100-80"),
        ("A100 (DGX-A100)", "a100-40"),
        ("H100-80GB", "h100"),
        ("H200-SXM", "h200"),
        ("B200", "b200"),
        ("DGXB200", "b200"),
        ("GB200", "gb200"),
        ("GB200 NVL72", "gb200"),
        ("GB200-186GB (DGX GB200)", "gb200"),
        ("h100-sxm5-80gb", "h100"),
        ("H100 SXM", "h100"),
        ("DGX-H100", "h100"),
        ("MI300X", "mi300x"),
    ],
)
def test_devices(label: str, preset: str) -> None:
    assert read_device(label).preset == preset


def test_variants_of_a_device_differ_from_its_preset() -> None:
    def device(label: str) -> tuple[float, float, float]:
        (node,) = cluster_of(replace(ROW, gpu=label)).nodes
        assert node.link is not None
        rates = (
            node.device.matmul_rate("bfloat16", 4096, 4096, 4096),
            node.device.memory_rate(2**28),
        )
        return *rates, node.link.bandwidth_bytes_per_s

    sxm, pcie, old = (device(f"H100{name}") for name in ("-SXM", " PCIe", "-96GB-HBM2e-500W"))
    assert all(slow < fast for slow, fast in zip(pcie, sxm, strict=True))
    assert (old[0], old[2]) == (sxm[0], sxm[2])
    assert old[1] < sxm[1]
    assert device("A800")[2] < device("A100-80GB")[2]
    gib = cluster_of(replace(ROW, gpu="H100-96GB-HBM2e-500W")).nodes[0].device.memory_bytes / 2**30
    assert gib == 96


@pytest.mark.parametrize(
    ("gpus", "domain"), [(8, 8), (128, 64), (512, 64), (576, 72), (2304, 72), (76, 72)]
)
def test_domains_are_used_equally(gpus: int, domain: int) -> None:
    row = replace(ROW, gpu="GB200", gpus=gpus, gpus_per_node=None, dp=gpus, global_batch=gpus)
    islands = cluster_of(row).topology.island
    assert np.bincount(islands).max() == domain


@pytest.mark.parametrize("label", ["TPU v4", "RTX A1000", "GA100X", "H20", "nan"])
def test_unknown_devices_raise(label: str) -> None:
    with pytest.raises(Unusable, match="unknown device"):
        read_device(label)


@pytest.mark.parametrize(
    ("text", "node_gbit", "device_gbit", "link_gb"),
    [
        ("1600 Gbps node-node RoCE", 1600, None, None),
        ("NVLink/NVSwitch intra; 8x200Gbps HDR IB per node", 1600, None, None),
        ("NVLink4 900GB/s; 8x400Gb/s IB per node", 3200, None, 450),
        ("NVLink; 4x100Gb RoCE per machine", 400, None, None),
        ("8x NDR 400 Gb/s", 3200, None, None),
        ("InfiniBand HDR", None, 200, None),
        ("400 Gb/s per GPU", None, 400, None),
        ("AWS p4d.24xlarge", 400, None, None),
        ("NVLink5 1.8TB/s; 4x400Gb/s IB per node", 1600, None, 900),
        ("", None, None, None),
        ("some network", None, None, None),
    ],
)
def test_links(
    text: str, node_gbit: float | None, device_gbit: float | None, link_gb: float | None
) -> None:
    machine = read_machine("H100-80GB", text)
    for value, expected, unit in (
        (machine.node_network_bytes_per_s, node_gbit, 1e9 / 8),
        (machine.device_network_bytes_per_s, device_gbit, 1e9 / 8),
        (machine.link_bytes_per_s, link_gb, 1e9),
    ):
        assert value == (None if expected is None else pytest.approx(expected * unit))


@given(st.text(max_size=40))
def test_any_text_is_accepted(text: str) -> None:
    read_machine("H100", text)


def rate(tp: int, dp: int, along: str) -> float:
    """Return bytes per second and rank of a row's all-gathers on a p3.16xlarge."""
    row = replace(ROW, gpu="V100 (AWS p3.16xlarge)", gpus=tp * dp, gpus_per_node=tp * dp)
    cluster = cluster_of(replace(row, tp=tp, dp=dp, pp=1, cp=1))
    grid = np.arange(tp * dp).reshape(dp, tp)
    groups = grid if along == "tp" else grid.T
    model = collective_model(cluster, "all_gather", groups)
    size = groups.shape[1]
    return (size - 1) / size / min(line.s_per_byte * line.factor.best for line in model.lines)


def test_groups_of_a_cube_mesh_have_the_links_between_their_devices() -> None:
    full = rate(8, 1, "tp")
    assert rate(4, 2, "tp") == pytest.approx(full * 4 / 6)  # one half of the cube
    assert rate(4, 2, "dp") == pytest.approx(full * 1 / 6)  # pairs across
    assert rate(2, 4, "dp") == pytest.approx(full * 2 / 6)  # every other device
    assert rate(2, 4, "tp") == pytest.approx(full * 1 / 6)
