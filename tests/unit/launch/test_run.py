"""`shardwise launch` on two local nodes, with stand-ins for ssh and torchrun."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launching import (
    HOSTILE,
    cluster_file,
    run_launch,
    stand_in_for_ssh,
    stand_in_for_torch,
    start_launch,
    wait_for,
    wait_until_gone,
    write,
)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a folder with a cluster file of nodes `a` and `b`."""
    stand_in_for_ssh(tmp_path)
    cluster_file(tmp_path, environment={"PYTHONPATH": stand_in_for_torch(tmp_path)})
    return tmp_path


def test_lines_have_node_names_and_arguments_arrive(two: Path) -> None:
    write(
        two / "train.py",
        "import os, sys, json\n"
        "print(json.dumps(sys.argv[1:]))\n"
        "for i in range(200): print(os.environ['NODE'], i, 'x' * 50)\n"
        "print('no end of line', end='', file=sys.stderr)\n",
    )
    code, out, err = run_launch(two, "--port", "0", "--", "train.py", *HOSTILE)
    assert code == 0, err
    lines = out.splitlines()
    assert lines.count(f"[a] {json.dumps(list(HOSTILE))}") == 1
    assert lines.count(f"[b] {json.dumps(list(HOSTILE))}") == 1
    for name, rank in (("a", 0), ("b", 1)):
        printed = [line for line in lines if line.startswith(f"[{name}] {rank} ")]
        assert printed == [f"[{name}] {rank} {i} {'x' * 50}" for i in range(200)]
    assert sorted(err.splitlines()) == ["[a] no end of line", "[b] no end of line"]
    assert not (two / "pwned").exists()


def test_dry_run_prints_commands_that_a_shell_can_run(two: Path) -> None:
    write(two / "train.py", "import sys\nprint(sys.argv[1:])\n")
    code, out, _ = run_launch(two, "--dry-run", "train.py", "a\nb", "$(x)", "--lr", "3")
    assert code == 0
    assert out.count("BatchMode=yes") == 2
    done = subprocess.run(["sh"], input=out, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [str(["a\nb", "$(x)", "--lr", "3"])] * 2


@pytest.mark.parametrize(
    ("failure", "expected"),
    [("sys.exit(3)", 3), pytest.param("os.kill(os.getpid(), 9)", 137, marks=pytest.mark.slow)],
)
def test_a_failing_node_stops_all_nodes(two: Path, failure: str, expected: int) -> None:
    write(
        two / "train.py",
        "import os, sys, time\n"
        "if os.environ['NODE'] == '1':\n"
        "    print('the reason', file=sys.stderr)\n"
        f"    {failure}\n"
        "time.sleep(100)\n",
    )
    began = time.monotonic()
    code, _, err = run_launch(two, "--port", "0", "--", "train.py", mark := f"mark-{two}")
    assert code == expected
    assert f"shardwise: node b failed with exit code {expected}; all nodes have stopped" in err
    assert "shardwise:   the reason" in err
    assert time.monotonic() - began < 30
    assert wait_until_gone(mark) == []


SLEEPER = (
    # Starts a child in a new session, as torchrun does, that ignores SIGTERM.
    "import os, pathlib, subprocess, sys, time\n"
    "if len(sys.argv) > 2: import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "else: subprocess.Popen([sys.executable, *sys.argv, 'deaf'], start_new_session=True)\n"
    "pathlib.Path('started-' + os.environ['NODE'] + str(len(sys.argv))).touch()\n"
    "time.sleep(100)\n"
)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGINT, 130),
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left_when_the_launcher_is_stopped(
    two: Path, number: signal.Signals, expected: int
) -> None:
    """Not even after SIGKILL, when the launcher cannot send a message."""
    write(two / "train.py", SLEEPER)
    mark = f"mark-{two}"
    process = start_launch(two, "--port", "0", "--grace-s", "1", "--", "train.py", mark)
    for name in ("02", "03", "12", "13"):
        wait_for(two / f"started-{name}")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == expected
    assert wait_until_gone(mark) == []


@pytest.mark.slow
def test_a_second_interrupt_kills_at_once(two: Path) -> None:
    write(two / "train.py", SLEEPER)
    mark = f"mark-{two}"
    process = start_launch(two, "--port", "0", "--grace-s", "60", "--", "train.py", mark)
    wait_for(two / "started-13")
    wait_for(two / "started-03")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert wait_until_gone(mark) == []


def test_a_busy_port_is_reported_before_anything_starts(two: Path) -> None:
    write(two / "train.py", "import pathlib; pathlib.Path('ran').touch()\n")
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        code, _, err = run_launch(two, "--port", port, "--", "train.py")
        assert code == 1
        assert f"port {port} is in use" in err
        assert "node a" in err
        assert "--port 0" in err
        assert not (two / "ran").exists()
    assert run_launch(two, "--port", port, "--", "train.py")[0] == 0
    assert (two / "ran").exists()


@pytest.mark.slow
def test_missing_requirements_are_reported_before_anything_starts(two: Path) -> None:
    code, _, err = run_launch(two, "--port", "0", "--", "nosuch.py")
    assert code == 1
    assert "2 of 2 nodes cannot start" in err
    assert f"no nosuch.py in {two}" in err
    cluster = two / "cluster.yaml"
    text = cluster.read_text()
    for old, new, message in (
        (sys.executable, "/no/python", "no Python at /no/python"),
        (f"folder: {two}", "folder: /no/folder", "no folder /no/folder"),
        ("fake ssh", "no ssh", "No such file or directory"),
    ):
        cluster.write_text(text.replace(old, new))
        code, _, err = run_launch(two, "--port", "0", "--", "train.py")
        assert code == 1
        assert message in err


@pytest.mark.slow
def test_ranks_run_shardwise_or_any_command(two: Path) -> None:
    code, out, err = run_launch(two, "--port", "0", "--", "shardwise", "launch", "--help")
    assert code == 0, err
    assert "[b]" in out
    assert "Start a command on every node" in out
    code, out, err = run_launch(two, "--port", "0", "-e", "X=1 2", "--", "sh", "-c", "echo $X")
    assert (code, sorted(out.splitlines())) == (0, ["[a] 1 2", "[b] 1 2"]), err


def test_a_single_local_node_needs_no_ssh(two: Path) -> None:
    cluster_file(two, (1,), with_ssh=False, environment={"PYTHONPATH": stand_in_for_torch(two)})
    write(two / "train.py", "print('ran')\n")
    code, out, err = run_launch(two, "--port", "0", "train.py")
    assert (code, out) == (0, "[a] ran\n"), err


@pytest.mark.slow
def test_guard_without_a_launcher_runs_to_the_end(two: Path) -> None:
    """Without standard input, as in a script, the guard does not mistake it for a lost launcher."""
    write(two / "train.py", "import time; time.sleep(3); print('done')\n")
    cluster_file(two, (1,), with_ssh=False, environment={"PYTHONPATH": stand_in_for_torch(two)})
    _, out, _ = run_launch(two, "--dry-run", "train.py")
    done = subprocess.run(
        ["sh", "-c", out],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
