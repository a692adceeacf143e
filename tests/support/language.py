"""Check the project's English: words and phrases that must not occur.

    python -m tests.support.language            # compare with the baseline, as `make lint`
    python -m tests.support.language PATH ...   # list every occurrence in files or folders
    python -m tests.support.language --lower    # lower the baseline after a clean-up

`NAMES` applies to identifiers in code, `PROSE` to comments, strings and pages. The counts in
`tests/data/language.json`, by part of the repository and rule, may only shrink; a rule whose
count is zero everywhere is enforced strictly.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "tests/data/language.json"
PARTS = ("src", "tests", "benchmarks", "examples", "docs")
SKIPPED = (
    "tests/support/language.py",
    "tests/unit/test_language.py",
    "tests/golden/expected/",
    "docs/_build/",
)

# Words of an identifier (`is_found`, `Found`) -> what to write instead.
WORDS = {
    "found": "result, or the noun of what it is",
    "told": "reported",
    "mine": "local",
    "theirs": "remote",
    "alike": "equal, or tied",
    "likeness": "ties",
    "quickest": "fastest",
    "beforehand": "precomputed",
    "noting": "recording",
    "pretend": "fake",
    "proving": "measurement",
    "rehearse": "time_compute",
    "rehearsed": "timed",
    "rehearsal": "benchmark",
    "heat": "race",
    "heats": "races",
    "talk": "collective",
    "talks": "collectives",
    "ledger": "memory_tracker",
    "blame": "stalled, or plan_entry",
    "polish": "local_search",
    "polished": "improved",
}
# Entire identifiers: as a part of a longer name these words may be right.
IDENTIFIERS = {
    "said": "constraint, or reported",
    "kept": "saved",
    "held": "local, or stored",
    "whole": "full",
    "way": "backend",
    "ways": "backends",
    "least": "lower_bound, or minimum",
    "most": "maximum",
    "alone": "single_rank",
    "wire": "link",
    "wires": "links",
    "bank": "layout_cache",
    "works": "workloads",
    "like": "same_key",
}
# Sentences: a name of the rule -> its pattern and what to write instead.
PROSE = {
    "Enters/Leaves": (r"\b(?:Enters|Leaves): ", "sentences that say what the module does"),
    "is none": (
        r"(?<!there )(?<!There )\b(?:is|are|was|were) none\b",
        "is invalid, does not exist",
    ),
    "is no X": (
        r"(?<!there )(?<!There )\b(?:is|are|was|were) no "
        r"(?!longer\b|more\b|less\b|one\b|other\b|better\b|worse\b|such\b|way\b)[a-z]",
        "is not a",
    ),
    "how long": (r"\b[Hh]ow long\?", "set either … or …"),
    "number type": (r"\bnumber types?\b", "dtype"),
    "computed again": (r"\bcomput(?:es?|ed|ing) again\b", "recomputed"),
    "beforehand": (r"\bbeforehand\b", "precomputed, in advance"),
    "quickest": (r"\bquickest\b", "fastest"),
    "alike": (r"\balike\b", "equal, the same way"),
    "told": (r"\b(?:is|are|was|were|not|be|been) told\b", "reported, printed"),
    "mine and theirs": (r"\b(?:mine|theirs)\b", "local and remote, its own"),
    "talk": (r"\btalk(?:s|ed|ing)?\b", "communicate"),
    "pretend": (r"\bpretend(?:s|ed|ing)?\b", "fake"),
    "rehearse": (r"\brehears\w+", "time the compute of"),
    "proving ground": (r"\bproving ground", "measurement server"),
    "wire": (r"\bwires?\b", "link"),
    "to be seen": (r"\bto be seen\b", "visible"),
    "another one": (r"\bis another one\b", "differs"),
    "goes by": (r"\bgoes by\b", "is named"),
    "processor": (r"(?<!multi)(?<!pre)\b[Pp]rocessors?\b", "CPU"),
    "microbatch": (r"(?<![\w`.=_/\"'-])[Mm]icrobatch(?:es)?(?![\w`=_(\"'-])", "micro-batch"),
    "what there is": (r"\bwhat there is\b", "the available …"),
    "is cut": (r"\b(?:is|are|be|was|were|being) cut\b", "is sharded, is split"),
    "like ones": (r"\btheir like\b|\bits like\b", "others of the same kind"),
    "as many as": (r"\bso many\b", "this many, that many"),
}

_WORD = re.compile(
    r"(?<![a-zA-Z])(?:" + "|".join(f"[{w[0]}{w[0].upper()}]{w[1:]}" for w in WORDS) + r")(?![a-z])"
)
_ALLOWED = re.compile(r"[Nn]ot_?[Ff]ound|least_squares|[Cc]rc_?[Ff]ound")
_IDENTIFIER = re.compile(r"(?<![\w.])(?:" + "|".join(IDENTIFIERS) + r")(?!\w)")
_PROSE = {rule: re.compile(pattern) for rule, (pattern, _) in PROSE.items()}
# Strings and comments of Python, in the order in which they begin.
_TEXTS = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\''
    r"|#[^\n]*",
    re.DOTALL,
)
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """A word or phrase that must not occur, with its position."""

    path: str
    line: int
    rule: str
    text: str

    @property
    def instead(self) -> str:
        """What to write instead."""
        return {**WORDS, **IDENTIFIERS}.get(self.rule) or PROSE[self.rule][1]


def occurrences(path: Path) -> Iterator[Occurrence]:
    """Yield the occurrences in a file."""
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    hits: list[tuple[int, str]] = []
    if path.suffix == ".py":
        spans = [match.span() for match in _TEXTS.finditer(text)]
        code = _outside(text, spans)
        for match in _WORD.finditer(code):
            if not _ALLOWED.search(code, max(0, match.start() - 4), match.end() + 8):
                hits.append((match.start(), match[0].lower()))
        hits += [(match.start(), match[0]) for match in _IDENTIFIER.finditer(code)]
    else:
        spans = list(_gaps(text, [match.span() for match in _CODE_BLOCK.finditer(text)]))
    hits += _prose_hits(text, spans)
    for position, rule in sorted(hits):
        begin, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
        line = text[begin : end if end >= 0 else len(text)].strip()
        yield Occurrence(path=name, line=text.count("\n", 0, position) + 1, rule=rule, text=line)


def _prose_hits(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """Yield the position and rule of every phrase within some spans."""
    prose = "\0".join(text[begin:end] for begin, end in spans)
    starts = [0, *accumulate(end - begin + 1 for begin, end in spans)]
    for rule, pattern in _PROSE.items():
        for match in pattern.finditer(prose):
            span = bisect_right(starts, match.start()) - 1
            yield spans[span][0] + match.start() - starts[span], rule


def _outside(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return the text with blanked spans, so that positions stay the same."""
    parts, end = [], 0
    for begin, after in spans:
        parts += [text[end:begin], " " * (after - begin)]
        end = after
    return "".join([*parts, text[end:]])


def _gaps(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return zip(edges[::2], edges[1::2], strict=True)


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files and pages under some paths."""
    for path in paths:
        if path.is_file():
            yield path
            continue
        for file in sorted([*path.rglob("*.py"), *path.rglob("*.md")]):
            name = str(file.relative_to(ROOT))
            if not name.startswith(SKIPPED):
                yield file


def count() -> dict[str, Counter[str]]:
    """Count the occurrences of every rule in every part of the repository."""
    counts = {}
    for part in PARTS:
        paths = [ROOT / part, *(ROOT.glob("*.md") if part == "docs" else ())]
        counts[part] = Counter(o.rule for file in files(paths) for o in occurrences(file))
    return counts


def excess(counts: Mapping[str, Counter[str]]) -> list[str]:
    """Describe where a rule occurs more often than the baseline allows."""
    allowed = json.loads(BASELINE.read_text())
    return [
        f"{part}: {number} occurrences of {rule!r}, {allowed.get(part, {}).get(rule, 0)} allowed"
        for part, rules in counts.items()
        for rule, number in sorted(rules.items())
        if number > allowed.get(part, {}).get(rule, 0)
    ]


def write(counts: Mapping[str, Counter[str]], *, only_lower: bool = True) -> None:
    """Write the counts as the new baseline, which may only decrease."""
    old = json.loads(BASELINE.read_text()) if only_lower else {}
    new = {
        part: {
            rule: min(number, old[part].get(rule, 0)) if only_lower else number
            for rule, number in sorted(rules.items())
        }
        for part, rules in counts.items()
    }
    BASELINE.write_text(json.dumps(new, indent=1) + "\n")


def main() -> int:
    """Run the checker from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", type=lambda text: Path(text).resolve())
    parser.add_argument("--lower", action="store_true")
    options = parser.parse_args()
    if options.paths:
        shown = [o for file in files(options.paths) for o in occurrences(file)]
        for o in shown:
            print(f"{o.path}:{o.line}: {o.rule!r} ({o.instead}): {o.text}")
        return 1 if shown else 0
    counts = count()
    problems = excess(counts)
    if options.lower and not problems:
        write(counts)
    for problem in problems:
        print(f"{problem}; list them: python -m tests.support.language {problem.split(':')[0]}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
