from __future__ import annotations

import json

import pytest

from shardwise import cli, doctor


def test_this_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in report["checks"]}
    assert {"python", "torch", "numpy", "gloo", "nccl", "loopback", "memory", "cpus"} <= names
    assert {"bf16 matmul"} <= names
    assert (exit_.value.code == 0) == report["ok"]


def test_a_crash_of_bf16_is_reported_with_the_cure() -> None:
    finding = doctor.bf16_finding("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert finding.status == "fail"
    assert finding.value == "crashes with SIGILL"
    assert finding.hint == "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


def test_an_error_of_bf16_is_reported() -> None:
    finding = doctor.bf16_finding("raise ValueError('no bf16')")
    assert (finding.status, finding.value) == ("fail", "ValueError: no bf16")


def test_a_closed_loopback_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr("socket.create_server", refuse)
    (finding,) = doctor._loopback()
    assert (finding.status, finding.value) == ("fail", "not permitted")


def test_the_table_shows_hints(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show([doctor.Finding(name="x", status="fail", value="broken", hint="mend it")])
    out = capsys.readouterr().out
    assert "broken" in out
    assert "try: mend it" in out
