"""Device labels and texts about links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.calibration.machines import read_device, read_machine
from shardwise.calibration.values import Unusable


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
        ("GB200", "gb200"),
        ("GB200 NVL72", "gb200"),
    ],
)
def test_devices(label: str, preset: str) -> None:
    assert read_device(label)[0] == preset


@pytest.mark.parametrize("label", ["TPU v4", "RTX 4090", "GA100X", "unknown thing"])
def test_unknown_devices(label: str) -> None:
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
def test_no_text_stops_the_reading(text: str) -> None:
    read_machine("H100", text)
