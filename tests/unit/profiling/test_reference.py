"""The factor of training over single calls; models that do not run are reported."""

from __future__ import annotations

import pytest

from shardwise.cluster import Cluster
from shardwise.errors import RankError
from shardwise.plans import Plan
from shardwise.profiling.compute import training_factor
from shardwise.tuning.compute_time import ComputeTimes
from shardwise.tuning.measurement_server import MeasurementServer


@pytest.mark.parametrize("failing", [1, 2])
def test_a_model_that_does_not_run_is_reported(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def time_compute(server: MeasurementServer, _: Plan) -> ComputeTimes:
        tried.append(server.graph.name)
        if len(tried) <= failing:
            raise RankError("rank 1 cannot run here: no room")
        return ComputeTimes(training_s={0: 1.0}, update_s={0: 1.0})

    monkeypatch.setattr(MeasurementServer, "time_compute", time_compute)
    notes: list[str] = []
    factor = training_factor(Cluster.local(2), notes.append)
    assert len(tried) == 2
    assert sum("rank 1 cannot run here: no room" in note for note in notes) == failing
    assert ("no model could be trained" in notes[-1]) == (failing == 2) == (factor == 1.0)
