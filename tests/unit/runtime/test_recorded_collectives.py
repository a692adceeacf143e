"""Recorded collectives return the same results, with sizes, waiting times and causes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.tracing import Recorder, own_seconds
from shardwise.runtime.transport.threads import ThreadTransport, run_threads


def test_recorded_collectives_are_unchanged_and_have_causes() -> None:
    def work(rank: int, transport: ThreadTransport) -> Any:
        mesh, recorder = ProcessMesh({"dp": 3}, rank, transport), Recorder(rank)
        mesh.note(recorder)
        assert mesh.transport is transport
        axis = mesh.axis("dp")
        data = torch.full((3,), float(rank + 1))
        results = [
            axis.all_reduce(data.clone()).wait(),
            axis.about("gradients").reduce_scatter(data.clone(), [1, 1, 1]).wait(),
            axis.about("parameters").all_gather(data[: rank + 1].clone(), [1, 2, 3]).wait(),
            axis.broadcast(data.clone(), 1).wait(),
            axis.about("update").all_to_all(data.clone(), [1, 1, 1], [1, 1, 1]).wait(),
        ]
        recorder.pause()
        axis.all_reduce(data.clone()).wait()
        return results, recorder.take()

    for results, events in run_threads(3, work):
        assert results[0].tolist() == [6.0] * 3
        assert results[1].tolist() == [6.0]
        assert results[2].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
        assert results[3].tolist() == [2.0] * 3
        assert results[4].tolist() == [1.0, 2.0, 3.0]
        causes = ["collectives", "gradients", "parameters", "collectives", "update"]
        assert [e.name for e in events if e.lane == "waiting"] == causes
        travels = [e for e in events if e.lane == "communication"]
        assert [e.name for e in travels] == causes
        assert travels[0].details == {"op": "all_reduce", "bytes": 12, "ranks": 3}


def test_without_a_recorder_axes_have_no_causes() -> None:
    axis = ProcessMesh({"dp": 1}).axis("dp")
    assert axis.about("gradients") is axis
    mesh = ProcessMesh({"dp": 1})
    mesh.note(Recorder(0))
    assert mesh.axis("dp").about("gradients") is not mesh.axis("dp")


def test_a_paused_recorder_removes_its_hooks() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(0, enabled=False)
    recorder.watch(module, ["0"])
    assert not module[0]._forward_hooks
    for blocks in (True, False):
        recorder.start(blocks=blocks)
        assert bool(module[0]._forward_hooks) == blocks
        with recorder.span("compute", "0F0"):
            module(torch.ones(1, 2, requires_grad=True)).sum().backward()
        recorder.pause()
        assert not module[0]._forward_hooks
        lanes = {event.lane for event in recorder.take()}
        assert lanes == ({"compute", "groups"} if blocks else {"compute"})


def test_own_seconds_exclude_waits() -> None:
    recorder = Recorder(0)
    recorder.add("compute", "0F0", 0, 100)
    recorder.add("waiting", "collectives", 20, 50)
    recorder.add("compute", "optimizer", 150, 200)
    recorder.add("waiting", "gradients", 100, 140)
    own, waiting = own_seconds(recorder.take())
    assert (round(own * 1e9), round(waiting * 1e9)) == (120, 70)
