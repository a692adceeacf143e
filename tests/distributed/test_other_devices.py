"""Training on a registered accelerator that is neither a CPU nor a GPU of NVIDIA."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.support import dummy_device
from tests.support.pool import Pool
from tests.support.training import Run, assert_equal, dense, make, plan_for, to_device, trained

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def library() -> Path:
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        pytest.skip("the device is compiled with ninja and a C++ compiler")
    folder = Path(tempfile.gettempdir()) / f"shardwise_dummy_device_{torch.__version__}"
    folder.mkdir(exist_ok=True)
    return dummy_device.build(folder)


@pytest.fixture(scope="module")
def group() -> Iterator[Pool]:
    pool = Pool(3)  # of its own: the device stays registered in its processes
    yield pool
    pool.close()


def parallel(library: Path, name: str, strategy: str, options: dict[str, Any]) -> Run:
    device = dummy_device.register(library)
    model, batch = to_device(*make(name), device)
    plan = plan_for(model, batch, strategy, dist.get_world_size(), **options)
    pm = sw.parallelize(model, batch, plan=plan)
    kinds = {parameter.device.type for parameter in pm.parameters()} - {"meta"}  # of other stages
    expected = {"cpu" if "parameters" in options.get("offload", ()) else dummy_device.NAME}
    assert kinds == expected, str(kinds)
    return trained(pm, batch)


def refused_by_gloo(library: Path) -> bool:
    tensor = torch.ones(3, device=dummy_device.register(library))
    try:
        dist.all_reduce(tensor)
    except (RuntimeError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        ("odd", "fsdp", {}),
        ("odd", "zero1", {}),
        ("fused_gpt", "tensor", {}),
        ("odd", "pipeline", {"pp": 3, "num_microbatches": 3}),
        ("odd", "fsdp", {"offload": ("parameters",)}),
        ("fused_gpt", "ddp", {"offload": ("activations",)}),
    ],
)
def test_a_registered_device_trains_like_a_cpu(
    library: Path, group: Pool, name: str, strategy: str, options: dict[str, Any]
) -> None:
    for run in group.run(parallel, library, name, strategy, options, timeout=110):
        assert_equal(run, dense(name))


def test_gloo_cannot_read_the_memory_of_the_device(library: Path, group: Pool) -> None:
    assert all(group.run(refused_by_gloo, library))


def recorded(library: Path) -> list[str]:
    from shardwise import runtime as rt

    device = dummy_device.register(library)
    recorder = rt.Recorder(0, device=device)
    with recorder.span("compute", "F", stage=0):
        pass
    return [event.name for event in recorder.take()]


def test_a_device_without_events_is_timed_by_the_host(library: Path, group: Pool) -> None:
    assert group.run(recorded, library) == [["F"]] * 3


def trainer_parts(library: Path) -> tuple[str, str, str, bool]:
    from shardwise.checkpoint.write import _host_copy, _side_stream
    from shardwise.runtime.devices import accelerator, backend_of
    from shardwise.training.processes import choose_device, process_group

    device = dummy_device.register(library)
    with process_group(choose_device("auto"), 60.0) as world:
        kind = world.device.type
    view = torch.arange(6.0).to(device)
    copy = _host_copy(view, _side_stream([view]))
    is_copied = copy.device.type == "cpu" and torch.equal(copy, torch.arange(6.0))
    return accelerator(), kind, backend_of(kind, 1), is_copied


def test_trainers_and_checkpoints_use_the_registered_device(library: Path, group: Pool) -> None:
    assert group.run(trainer_parts, library) == [("dummy", "dummy", "gloo", True)] * 3
