"""Pages whose code is run; `python -m tests.support.pages docs/tour.md` writes what it prints.

Blocks of a page share their names and run in one folder, where `examples/` is ours.

    ```python                     is run; a ```text (or bare) block after it is what it prints
    # not run: needs 8 GPUs       as its first line: is not, and the reader sees why
    # torchrun … train.py         is a program, written to this file; the slow tests run it on ranks
    # from out/ranks_0_1.py       is an excerpt: its lines are in that file, in this order
    <!-- run -->                  before a shell block: its `shardwise` commands are run
    <!-- file: model.py -->       before a block: it is written to this file
    <!-- slow -->                 before a block: it is run by the slow tests only; also `run slow`

Relative errors are rounding, so their digits are not compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.S | re.M
)
MARK = re.compile(r"<!-- (?P<mark>[^>]+?) -->\s*\Z")
ERROR = re.compile(r"\d\.\de-\d+")
PYTHON = ("python", "py")
NOT_RUN, TORCHRUN, EXCERPT = "# not run: ", "# torchrun ", "# from "


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block, the comment before it, and where the output after it is."""

    language: str
    code: str
    mark: str
    output: slice | None

    @property
    def first_line(self) -> str:
        return self.code.partition("\n")[0]

    @property
    def file(self) -> str:
        """The file that it is written to, if it is."""
        if self.language in PYTHON and self.first_line.startswith(TORCHRUN):
            return self.first_line.split()[-1]
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else ""

    @property
    def is_shell(self) -> bool:
        return self.mark.startswith("run")

    @property
    def is_slow(self) -> bool:
        return self.mark.endswith("slow")

    @property
    def is_run(self) -> bool:
        """Whether a test of this page does something with it."""
        if self.is_shell or self.file:
            return True
        return self.language in PYTHON and not self.first_line.startswith(NOT_RUN)


def read_blocks(text: str) -> list[Block]:
    """All fenced blocks of a page."""
    found = list(FENCE.finditer(text))
    blocks = []
    for here, then in zip(found, [*found[1:], None], strict=False):
        adjacent = then is not None and not text[here.end() : then.start()].strip()
        printed = adjacent and then is not None and then["info"] in ("", "text")
        mark = MARK.search(text[: here.start()])
        blocks.append(
            Block(
                language=here["info"].strip(),
                code=textwrap.dedent(here["body"]),
                mark=mark["mark"] if mark else "",
                output=slice(*then.span("body")) if printed and then else None,
            )
        )
    return blocks


def run_page(text: str, *, slow: bool = True) -> str:
    """The page with the outputs that its code prints now, run in the current folder."""
    names: dict[str, object] = {}
    changes: list[tuple[slice, str]] = []
    for block in read_blocks(text):
        if not block.is_run or (block.is_slow and not slow):
            continue
        printed = _run(block, names)
        if block.output is not None and not block.file:
            changes.append((block.output, printed))
    for place, printed in reversed(changes):
        text = text[: place.start] + printed + text[place.stop :]
    return text


def _run(block: Block, names: dict[str, object]) -> str:
    if block.file:
        Path(block.file).write_text(block.code)
        return ""
    if block.first_line.startswith(EXCERPT):
        _check_excerpt(block)
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if block.is_shell:
            for words in _commands(block.code):
                _command(words)
        else:
            exec(block.code, names)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def _check_excerpt(block: Block) -> None:
    file, *lines = block.code.splitlines()
    rest = iter(Path(file.removeprefix(EXCERPT).split()[0]).read_text().splitlines())
    for line in lines:
        assert line.strip() in ("", "...") or line in rest, f"{file[2:]} has no {line!r} there"


def _commands(code: str) -> Iterator[list[str]]:
    """The words of each command, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def _command(words: list[str]) -> None:
    """A command line of ours, in this process: another one would import torch again."""
    from shardwise.cli import main

    assert words[0] == "shardwise", f"{words[0]} is not run; mark only blocks of shardwise"
    code: object = 0
    try:
        main(words[1:])
    except SystemExit as end:
        code = end.code
    assert not code, f"{shlex.join(words)}: exit {code}"


def without_errors(text: str) -> str:
    """The text with every relative error as one word."""
    return ERROR.sub("ERROR", text)


def main(pages: list[str]) -> None:
    """Write into each page what its code prints now."""
    os.environ["COLUMNS"] = "100"
    sys.path.insert(0, str(ROOT))
    for page in (Path(name).resolve() for name in pages):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path("examples").symlink_to(ROOT / "examples")
            page.write_text(run_page(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
