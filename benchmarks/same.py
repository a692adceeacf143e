"""Compare the output of Shardwise with a frozen record.

    python -m benchmarks.same [--quick] [--only emit,plans] [--match llama]
    python -m benchmarks.same --write

The record is in benchmarks/results/same: every text of `benchmarks.same_cases` by section, and the
CPU time of planning. Each item is one of

    identical   equal texts
    reworded    equal code with other comments, or equal figures with other keys
    accepted    different as `accepted.json` allows
    differs     anything else; the exit status is 1

Both texts of an item that is not identical are written to out/same, old and new. `accepted.json`
has `replacements`, regular expressions applied to recorded texts before they are compared (for
names that changed on purpose), `fields`, which rename or ignore single fields of JSON items by
their dotted paths (all others must be equal, up to rounding and omitted empty values), and
`differences`, patterns of items that may differ entirely; every entry has a reason. Planning that
takes 25 % more CPU time than recorded is a warning, or a failure with `--strict-time`, because
other work on the machine affects it.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from math import isclose
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results/same"
OUT = Path("out/same")
SLOWER = 1.25
MIN_PLANNING_S = 1.0  # differences below this are not compared
ROUNDING = 1e-11  # relative; recorded durations have 12 digits
EMPTY = (None, "", "none", 0, False)  # values that files may omit
SHOWN = 12  # differing items per section
VERDICTS = ("identical", "reworded", "accepted", "differs", "missing", "new")
FAILURES = ("differs", "missing", "new")


@dataclass(frozen=True, kw_only=True)
class AcceptedFields:
    """Fields of JSON items that were renamed, added or dropped on purpose, by dotted paths."""

    items: str
    renamed: tuple[tuple[str, str], ...]  # regular expression on recorded paths, new path
    ignored: tuple[str, ...]

    def agree(self, old: str, new: str) -> bool:
        """Return whether two JSON texts agree in all other fields."""
        before, after = self._fields(old, self.renamed), self._fields(new, ())
        return before.keys() == after.keys() and all(
            value == after[path]
            or (
                isinstance(value, float)
                and isinstance(after[path], float)
                and isclose(value, after[path], rel_tol=ROUNDING)
            )
            for path, value in before.items()
        )

    def _fields(self, text: str, renamed: Sequence[tuple[str, str]]) -> dict[str, Any]:
        fields = {}
        for path, value in _paths(json.loads(text)):
            for pattern, replacement in renamed:
                path = re.sub(pattern, replacement, path)
            if value not in EMPTY and not any(re.search(p, path) for p in self.ignored):
                fields[path] = value
        return fields


def _paths(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping | list):
        items = data.items() if isinstance(data, Mapping) else enumerate(data)
        for key, value in items:
            yield from _paths(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, data


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Differences that were introduced on purpose."""

    replacements: tuple[tuple[str, str, str], ...]  # item pattern, regular expression, text
    fields: tuple[AcceptedFields, ...]
    differences: tuple[str, ...]  # item patterns

    @staticmethod
    def read() -> Accepted:
        """Read the file next to the record."""
        path = RECORD / "accepted.json"
        data = json.loads(path.read_text()) if path.exists() else {}
        return Accepted(
            replacements=tuple(
                (entry["items"], entry["replace"], entry["with"])
                for entry in data.get("replacements", ())
            ),
            fields=tuple(
                AcceptedFields(
                    items=entry["items"],
                    renamed=tuple((old, new) for old, new in entry.get("renamed", {}).items()),
                    ignored=tuple(entry.get("ignored", ())),
                )
                for entry in data.get("fields", ())
            ),
            differences=tuple(entry["items"] for entry in data.get("differences", ())),
        )

    def translate(self, name: str, text: str) -> str:
        """Return a recorded text with current names."""
        for items, pattern, new in self.replacements:
            if fnmatchcase(name, items):
                text = re.sub(pattern, new, text)
        return text


# ------------------------------------------------------------------ the record


def read_record(sections: Sequence[str]) -> dict[str, str]:
    """Return the recorded texts of some sections."""
    texts: dict[str, str] = {}
    for section in sections:
        path = RECORD / f"{section}.json.xz"
        if path.exists():
            texts |= json.loads(lzma.decompress(path.read_bytes()))
    return texts


def read_times() -> dict[str, float]:
    """Return the recorded CPU seconds of planning."""
    path = RECORD / "planning.json"
    return dict(json.loads(path.read_text())["cpu_s"]) if path.exists() else {}


def write_record(items: Mapping[str, str], times: Mapping[str, float]) -> None:
    """Record the items of a run; other recorded items stay."""
    import numpy
    import torch

    RECORD.mkdir(parents=True, exist_ok=True)
    sections: dict[str, dict[str, str]] = {}
    for name, text in sorted(items.items()):
        sections.setdefault(name.partition("/")[0], {})[name] = text
    for section, texts in sections.items():
        texts = dict(sorted({**read_record([section]), **texts}.items()))
        packed = lzma.compress(json.dumps(texts, indent=0).encode(), preset=9)
        (RECORD / f"{section}.json.xz").write_bytes(packed)
    about = {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": sys.version.split()[0],
    }
    times = {**read_times(), **times}
    data = {"made_with": about, "cpu_s": {name: round(times[name], 2) for name in sorted(times)}}
    (RECORD / "planning.json").write_text(json.dumps(data, indent=1) + "\n")


# ------------------------------------------------------------------ running


def run_jobs(names: Sequence[str]) -> list[tuple[str, Any]]:
    """Run jobs in sequence; the result of a failed job is its traceback."""
    import torch

    from benchmarks.same_cases import jobs

    torch.set_num_threads(1)
    all_jobs = jobs()
    results: list[tuple[str, Any]] = []
    for name in names:
        try:
            results.append((name, all_jobs[name].run()))
        except Exception:
            results.append((name, traceback.format_exc()))
        print(f"  {name}", file=sys.stderr, flush=True)
    return results


def run_all(names: Sequence[str], processes: int) -> tuple[dict[str, str], dict[str, float], int]:
    """Run jobs in new processes; return texts, CPU seconds of planning, and failed jobs."""
    items: dict[str, str] = {}
    times: dict[str, float] = {}
    failed = 0
    # A process always runs the same jobs in the same order, as caches affect planning times.
    shares = [names[start::processes] for start in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for results in pool.map(run_jobs, shares):
            for name, result in results:
                if isinstance(result, str):
                    failed += 1
                    print(f"{name} failed:\n{result}", file=sys.stderr)
                else:
                    items |= result.items
                    times |= result.planning_s
    return items, times, failed


# ------------------------------------------------------------------ comparing


def verdict(name: str, old: str | None, new: str | None, accepted: Accepted) -> str:
    """Classify an item compared with the recorded one."""
    if old is not None and new is not None:
        old = accepted.translate(name, old)
        if old == new:
            return "identical"
        if meaning(name, old) == meaning(name, new):
            return "reworded"
        if any(fnmatchcase(name, f.items) and f.agree(old, new) for f in accepted.fields):
            return "accepted"
    if any(fnmatchcase(name, pattern) for pattern in accepted.differences):
        return "accepted"
    return "new" if old is None else "missing" if new is None else "differs"


def meaning(name: str, text: str) -> object:
    """Return the content of a text: code without comments, or values without keys."""
    if name.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and _is_docstring(body[0]):
                del body[0]
        return ast.dump(tree)
    try:
        return Counter(map(repr, _values(json.loads(text))))
    except json.JSONDecodeError:
        return text


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _values(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _values(value)
    elif isinstance(data, list):
        yield len(data)
        for value in data:
            yield from _values(value)
    else:
        yield data


def first_difference(old: str, new: str) -> str:
    """Return the first line in which two texts differ."""
    lines = zip_longest(old.splitlines(), new.splitlines(), fillvalue="(end)")
    for number, (before, after) in enumerate(lines, start=1):
        if before != after:
            return f"line {number}: {before.strip()[:150]!r} is now {after.strip()[:150]!r}"
    return "line ends"


def write_both(name: str, old: str | None, new: str | None) -> None:
    """Write the texts of an item to out/same, for a diff."""
    file = re.sub(r"[^\w.-]+", "_", name)
    OUT.mkdir(parents=True, exist_ok=True)
    for kind, text in (("old", old), ("new", new)):
        if text is not None:
            (OUT / f"{file}.{kind}").write_text(text)


def compare(old: Mapping[str, str], new: Mapping[str, str], accepted: Accepted) -> int:
    """Print the classes of items in each section; return the number of failures."""
    counts: dict[str, Counter[str]] = {}
    lines: dict[str, list[str]] = {}
    for name in sorted({*old, *new}):
        section = name.partition("/")[0]
        before, after = old.get(name), new.get(name)
        state = verdict(name, before, after, accepted)
        counts.setdefault(section, Counter())[state] += 1
        if state == "identical":
            continue
        translated = None if before is None else accepted.translate(name, before)
        write_both(name, translated, after)
        if state in FAILURES:
            detail = ""
            if translated is not None and after is not None:
                detail = ": " + first_difference(translated, after)
            lines.setdefault(section, []).append(f"{state:8} {name}{detail}")
    print(f"{'section':14}" + "".join(f"{word:>11}" for word in VERDICTS))
    for section, counter in counts.items():
        print(f"{section:14}" + "".join(f"{counter[word] or '·':>11}" for word in VERDICTS))
    for section, texts in lines.items():
        print(f"\n{section}")
        print(*(f"  {text}" for text in texts[:SHOWN]), sep="\n")
        if len(texts) > SHOWN:
            print(f"  … and {len(texts) - SHOWN} more: {OUT}")
    return sum(counter[word] for counter in counts.values() for word in FAILURES)


def compare_times(old: Mapping[str, float], new: Mapping[str, float]) -> int:
    """Print the CPU time of planning and the recorded one; return the number of slower cases."""
    both = [name for name in new if name in old]
    if not both:
        return 0
    total_old, total_new = (sum(times[name] for name in both) for times in (old, new))
    print(
        f"\nplanning: {total_new:.1f} s of CPU for {len(both)} plans, recorded {total_old:.1f} s "
        f"({total_new / total_old - 1:+.0%})"
    )
    slower = [n for n in both if new[n] > SLOWER * old[n] and new[n] - old[n] > MIN_PLANNING_S]
    for name in slower:
        print(f"  slower: {name}: {new[name]:.1f} s, recorded {old[name]:.1f} s")
    return len(slower)


# ------------------------------------------------------------------ command line


def read_options() -> argparse.Namespace:
    """Read the command line."""
    from benchmarks.same_cases import SECTIONS

    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", type=words, default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--match", default="", help="jobs whose name contains this, such as llama")
    parser.add_argument("--quick", action="store_true", help="small models only")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--write", action="store_true", help="record the selected jobs")
    parser.add_argument("--strict-time", action="store_true", help="fail if planning is slower")
    options = parser.parse_args()
    unknown = [section for section in options.only if section not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; known: {', '.join(SECTIONS)}")
    return options


def main() -> int:
    """Run the selected jobs and compare or record their items."""
    from benchmarks.same_cases import jobs

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    options = read_options()
    all_jobs = jobs()
    selected = [
        name
        for name, job in all_jobs.items()
        if options.match in name
        and (job.quick or not options.quick)
        and set(job.sections) & set(options.only)
    ]
    items, times, failed = run_all(selected, options.jobs)
    if options.write:
        write_record(items, times)
        print(
            f"recorded {len(items)} items in {RECORD}" + (f"; {failed} jobs failed" * bool(failed))
        )
        return 1 if failed else 0
    items = {n: text for n, text in items.items() if n.partition("/")[0] in options.only}
    recorded = read_record(options.only)
    if len(selected) < len(all_jobs):
        # Items of jobs that were not selected are not missing.
        made = {job_prefix(name) for name in items}
        recorded = {n: text for n, text in recorded.items() if job_prefix(n) in made}
    differing = compare(recorded, items, Accepted.read())
    slower = compare_times(read_times(), times)
    return 1 if failed or differing or (options.strict_time and slower) else 0


def job_prefix(name: str) -> str:
    """Return the section and the case of an item."""
    return "/".join(name.split("/")[:3])


if __name__ == "__main__":
    sys.exit(main())
