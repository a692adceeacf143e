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


def test_this_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in report["checks"]}
    assert {"python", "torch", "numpy", "gloo", "nccl", "loopback", "memory", "cpus"} <= names
    assert {"bf16 matmul", "transformers", "accelerate", "lightning", "compiler"} <= names
    assert {"disk", "/dev/shm", "port", "host name", "open files"} <= names
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


def test_what_is_optional_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name == "lightning":
            return "2.1.3"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    found = {finding.name: finding for finding in doctor._packages()}
    assert found["transformers"].status == "ok"
    assert found["transformers"].hint == 'pip install "shardwise[huggingface]"'
    assert (found["lightning"].status, found["lightning"].value) == (
        "warn",
        "2.1.3, older than 2.5",
    )


def test_little_room_and_a_missing_compiler_are_warnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for check in (doctor._disk, doctor._shared_memory, doctor._compiler):
        for finding in check():
            assert finding.status == "warn" or "not on this" in finding.value
            assert finding.hint or "not on this" in finding.value


def test_a_port_in_use_is_named() -> None:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", doctor._PORT)):
        (finding,) = doctor._port()
        assert finding.status == "warn"
        assert "--master-port" in finding.hint


def test_optional_packages_are_those_of_the_extras() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for package, least, install in doctor._OPTIONAL:
        extra = install.partition("[")[2].partition("]")[0]
        wanted = next(entry for entry in extras[extra] if entry.startswith(package))
        assert wanted.partition(">=")[2] == ".".join(map(str, least))
