"""Classification of errors, and failures of a single rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwise.runtime.failures import FailureReports, _is_communication, naming_failures
from shardwise.runtime.rendezvous import Heartbeat, start_heartbeat

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, dist.DistBackendError])
def test_a_single_rank_raises_errors_unchanged(kind: type[Exception]) -> None:
    start_heartbeat()
    with pytest.raises(kind, match="Connection closed"), naming_failures(1):
        raise kind("Connection closed by peer")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:61670"),
        RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 20000ms for recv"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1"),
        dist.DistNetworkError("Connection reset by peer"),
    ],
)
def test_failures_of_communication_are_recognized(error: Exception) -> None:
    assert _is_communication(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA out of memory"),
        NotImplementedError("gloo/"),
        KeyboardInterrupt(),
    ],
)
def test_other_failures_are_not_of_communication(error: BaseException) -> None:
    assert not _is_communication(error)


def test_a_report_is_visible_until_it_is_withdrawn() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        heartbeat = Heartbeat()
        reports = FailureReports(heartbeat)
        assert reports.report_of(0) is None
        reports.publish("Connection closed by peer")
        assert reports.report_of(0) == "Connection closed by peer"
        reports.withdraw()
        assert reports.report_of(0) is None
        heartbeat.end()
    finally:
        dist.destroy_process_group()
