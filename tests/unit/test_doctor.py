"""`shardwise doctor`: the checks of this machine and their hints."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
import socket
import tomllib
from pathlib import Path

import pytest

from shardwise import cli, doctor


def test_all_checks_run_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in report["checks"]}
    assert {"python", "torch", "numpy", "gloo", "nccl", "loopback", "memory", "cpus"} <= names
    assert {"bf16 matmul", "transformers", "accelerate", "lightning", "compiler"} <= names
    assert {"disk", "/dev/shm", "port", "host name", "open files"} <= names
    assert (exit_.value.code == 0) == report["ok"]


def test_a_crash_of_bf16_is_reported_with_a_hint() -> None:
    finding = doctor.bf16_finding("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert finding.status == "fail"
    assert finding.value == "crashes with SIGILL"
    assert finding.hint == "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


def test_an_error_of_bf16_is_reported() -> None:
    finding = doctor.bf16_finding("raise ValueError('no bf16')")
    assert (finding.status, finding.value) == ("fail", "ValueError: no bf16")


def test_without_a_gpu_no_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (finding,) = doctor._ranks()
    assert (finding.status, finding.value) == ("ok", "no GPUs: NCCL was not tried")


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [1, 3])
def test_ranks_that_communicate_are_timed(num_gpus: int) -> None:
    finding = doctor.ranks_finding("gloo", num_gpus)
    assert finding.status == "ok", finding
    assert finding.value.startswith(f"{max(2, num_gpus)} ranks")
    assert finding.value.count(" ms") == 2


@pytest.mark.slow
def test_ranks_that_cannot_start_are_reported() -> None:
    finding = doctor.ranks_finding("nope", 1)
    assert (finding.status, finding.value[:7]) == ("fail", "rank 0:")
    assert "NCCL_DEBUG=INFO" in finding.hint


def test_a_closed_loopback_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr("socket.create_server", refuse)
    (finding,) = doctor._loopback()
    assert (finding.status, finding.value) == ("fail", "not permitted")


def test_the_table_shows_hints(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show([doctor.Finding(name="x", status="fail", value="broken", hint="fix it")])
    out = capsys.readouterr().out
    assert "broken" in out
    assert "try: fix it" in out


def test_optional_packages_have_install_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name == "lightning":
            return "2.1.3"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    findings = {finding.name: finding for finding in doctor._packages()}
    assert findings["transformers"].status == "ok"
    assert findings["transformers"].hint == 'pip install "shardwise[huggingface]"'
    assert (findings["lightning"].status, findings["lightning"].value) == (
        "warn",
        "2.1.3, older than 2.5",
    )


def test_little_space_and_a_missing_compiler_are_warnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for check in (doctor._disk, doctor._shared_memory, doctor._compiler):
        for finding in check():
            assert finding.status == "warn" or "not on this" in finding.value
            assert finding.hint or "not on this" in finding.value


def test_a_port_in_use_is_a_warning() -> None:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", doctor._PORT)):
        (finding,) = doctor._port()
        assert finding.status == "warn"
        assert "--master-port" in finding.hint


def test_optional_packages_match_the_extras() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for package, minimum, install in doctor._OPTIONAL:
        extra = install.partition("[")[2].partition("]")[0]
        requirement = next(entry for entry in extras[extra] if entry.startswith(package))
        assert requirement.partition(">=")[2] == ".".join(map(str, minimum))
