"""The command line of the sweep; see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hostile import mutate
from benchmarks.hostile.formats import Format, all_formats, with_header
from shardwise.errors import ShardwiseError

LIMIT_S = 10  # of CPU time, which does not depend on other processes
WALL_S = 120
MEMORY_BYTES = 2 << 30
FAULTS = ("exception", "hang", "memory", "ran code")
WATCHED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen",
    "pty.spawn", "socket.connect", "socket.bind", "ctypes.dlopen", "webbrowser.open",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a file ended."""

    format: str
    case: str
    how: str
    detail: str = ""
    seconds: float = 0.0


def damaged(form: Format, number: int) -> tuple[str, bytes]:
    """Return the `number`-th damaged file of a format, and what was done to it."""
    chance = random.Random(f"{form.name}:{number}")
    kind = chance.random()
    if form.kind == "yaml" and kind < 0.1:
        return "bomb", mutate.bomb(chance)
    if form.value is None or kind < 0.4:
        return "bytes", mutate.mutated_bytes(form.data, chance)
    if form.kind == "json" and kind < 0.45:
        return "doubled key", mutate.doubled_key(form.value, chance)
    return "value", written(form, mutate.mutated_value(form.value, chance))


def written(form: Format, value: Any) -> bytes:
    """Return a value as a file of the format."""
    if form.kind == "safetensors":
        return with_header(form.data, value)
    return mutate.as_text(form.sign(value), form.kind)


def hostile(form: Format, number: int, text: str) -> bytes | None:
    """Return the format's file with a hostile string in one of its fields of text."""
    if form.value is None:
        cells = form.data.decode().split(",")
        cells[number % len(cells)] = text
        return ",".join(cells).encode("utf-8", "surrogatepass")
    fields = mutate.text_places(form.value)
    return written(form, mutate.put(form.value, fields[number % len(fields)], text))


# ------------------------------------------------------------ one file


def read_once(form: Format, data: bytes, folder: Path) -> tuple[str, str]:
    """Read a file in this process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = form.prepare(folder / "files", data) if form.beside else _alone(form, folder, data)
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            form.read(path)
    except ShardwiseError as error:
        return "refused", str(error)[:200]
    except MemoryError:
        return "memory", "MemoryError"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(last) if "shardwise" in f.filename), last[-1])
        where = f"{Path(place.filename).name}:{place.lineno}"
        return "exception", f"{type(error).__name__}: {error} at {where}"[:300]
    return "right", ""


def _alone(form: Format, folder: Path, data: bytes) -> Path:
    path = folder / form.file
    path.write_bytes(data)
    return path


def in_child(work: Callable[[], Any], files: int = 1) -> tuple[str, Any]:
    """Run some work on files in a fork with limits: "done" and its result, or how it ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        soft = int(time.process_time()) + LIMIT_S * files
        resource.setrlimit(resource.RLIMIT_CPU, (soft + 1, soft + 2))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        with os.fdopen(write, "wb") as file:
            pickle.dump(work(), file)
        os._exit(0)
    os.close(write)
    pieces, deadline = [], time.monotonic() + WALL_S * files
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(read, 1 << 16)
        if not piece:
            break
        pieces.append(piece)
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    _, status, usage = os.wait4(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        slow = number in (signal.SIGXCPU, signal.SIGKILL)
        return ("hang" if slow else "exception"), f"signal {number}"
    if usage.ru_maxrss * 1024 > MEMORY_BYTES + _base_rss():
        return "memory", f"{usage.ru_maxrss >> 10} MiB"
    return "done", pickle.loads(b"".join(pieces))


def _base_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ------------------------------------------------------------ the sweeps


def sweep_files(formats: list[Format], numbers: range, folder: Path) -> list[Outcome]:
    """Read the corrupt files with these numbers, an equal share of each format."""
    outcomes = []
    for number in numbers:
        form = formats[number % len(formats)]
        case, data = damaged(form, number)
        begin = time.monotonic()
        how, result = in_child(lambda form=form, data=data: read_once(form, data, folder))
        detail = result if how != "done" else result[1]
        how = how if how != "done" else result[0]
        seconds = time.monotonic() - begin
        outcomes.append(Outcome(form.name, f"{number} {case}", how, detail, seconds))
        _show(outcomes[-1])
    return outcomes


def _show(outcome: Outcome) -> None:
    if outcome.how in FAULTS:
        parts = (outcome.how, outcome.format, outcome.case, outcome.detail)
        print(" | ".join(parts).encode(errors="replace").decode(), flush=True)


def sweep_strings(formats: list[Format], count: int, folder: Path, seed: int = 0) -> list[Outcome]:
    """Read every format with every hostile string in one of its fields, in turn."""
    sentinel = folder.parent / "ran"
    strings = mutate.hostile_strings(count, str(sentinel), seed)
    outcomes = []
    for form in formats:
        for begin in range(0, count, 50):
            numbers = range(begin, min(count, begin + 50))

            def work(form: Format = form, numbers: range = numbers) -> list[tuple[str, str]]:
                events = watch_audit(folder)
                results = []
                for number in numbers:
                    data = hostile(form, number, strings[number])
                    events.clear()
                    how, detail = read_once(form, data, folder)
                    if sentinel.exists() or events:
                        how, detail = "ran code", f"{events} {strings[number]!r}"
                    results.append((how, detail))
                return results

            how, result = in_child(work, len(numbers))
            rows = result if how == "done" else [(how, str(result))] * len(numbers)
            for number, row in zip(numbers, rows, strict=True):
                outcomes.append(Outcome(form.name, f"string {number}", row[0], row[1]))
                _show(outcomes[-1])
    return outcomes


def watch_audit(folder: Path) -> list[str]:
    """Record processes, sockets, and files opened for writing outside `folder`."""
    events: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in WATCHED:
            events.append(f"{event} {args[:1]}")
        elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            place = os.path.realpath(os.fspath(args[0])) if not isinstance(args[0], int) else ""
            if place and not place.startswith(os.path.realpath(folder)) and "/dev/" not in place:
                events.append(f"open {place}")

    sys.addaudithook(hook)
    return events


def summary(outcomes: list[Outcome]) -> dict[str, dict[str, int]]:
    """Return the number of each result by format."""
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.format, Counter())[outcome.how] += 1
    total = Counter(outcome.how for outcome in outcomes)
    return {**{name: dict(c) for name, c in counts.items()}, "all": dict(total)}


def main() -> None:
    """Sweep, print the counts and every fault; the exit code is 1 if there was one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile")
    parser.add_argument("--files", type=int, default=2000, help="corrupt files")
    parser.add_argument("--strings", type=int, default=1000, help="hostile strings for each format")
    parser.add_argument("--format", help="only this format")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the number of the first file, and the seed of the strings",
    )
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.files)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        (Path(base) / "examples").mkdir()
        formats = all_formats(Path(base) / "examples")
        if options.format:
            formats = [form for form in formats if form.name == options.format]
        for form in formats:
            how, result = in_child(lambda f=form: read_once(f, f.data, Path(base) / "work"))
            if how != "done" or result[0] != "right":
                raise SystemExit(f"the example of {form.name} is not read: {how} {result}")
        files = sweep_files(formats, numbers, Path(base) / "work")
        strings = sweep_strings(formats, options.strings, Path(base) / "work", options.first)
    faults = [o for o in (*files, *strings) if o.how in FAULTS]
    slowest = max(files, key=lambda o: o.seconds, default=None)
    result = {
        "files": summary(files),
        "strings": summary(strings),
        "formats": [form.name for form in formats],
        "faults": len(faults),
        "slowest_s": round(slowest.seconds, 2) if slowest else 0.0,
    }
    print(json.dumps({k: result[k] for k in ("faults", "slowest_s")}))
    print("files", result["files"].get("all"), "strings", result["strings"].get("all"))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
