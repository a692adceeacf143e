"""Run the code of pages; `python -m tests.support.pages docs/tour.md` updates its output.

Blocks of a page share their names and run in one folder with a link to `examples/`.

    ```python                     runs; a ```text (or bare) block after it is its output
    # not run: needs 8 GPUs       as the first line: does not run, for this reason
    # torchrun … train.py         as the first line: a program for this file, run by slow tests
    # from out/ranks_0_1.py       as the first line: an excerpt of this file, in order
    <!-- run -->                  before a shell block: runs its `shardwise` commands
    <!-- file: model.py -->       before a block: writes it to this file
    <!-- slow -->                 before a block: runs only in slow tests; also `run slow`

The digits of relative errors are not compared, because they are rounding.
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
    """A fenced block, the comment before it, and the position of its output."""

    language: str
    code: str
    mark: str
    output: slice | None

    @property
    def first_line(self) -> str:
        return self.code.partition("\n")[0]

    @property
    def file(self) -> str:
        """The file that the block is written to, if any."""
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
        """Whether tests run or write the block."""
        if self.is_shell or self.file:
            return True
        return self.language in PYTHON and not self.first_line.startswith(NOT_RUN)


def read_blocks(text: str) -> list[Block]:
    """Return all fenced blocks of a page."""
    fences = list(FENCE.finditer(text))
    blocks = []
    for fence, following in zip(fences, [*fences[1:], None], strict=False):
        adjacent = following is not None and not text[fence.end() : following.start()].strip()
        printed = adjacent and following is not None and following["info"] in ("", "text")
        mark = MARK.search(text[: fence.start()])
        blocks.append(
            Block(
                language=fence["info"].strip(),
                code=textwrap.dedent(fence["body"]),
                mark=mark["mark"] if mark else "",
                output=slice(*following.span("body")) if printed and following else None,
            )
        )
    return blocks


def run_page(text: str, *, slow: bool = True) -> str:
    """Run the code of a page in the current folder; return the page with its output."""
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
    remaining = iter(Path(file.removeprefix(EXCERPT).split()[0]).read_text().splitlines())
    for line in lines:
        assert line.strip() in ("", "...") or line in remaining, f"{file[2:]} has no {line!r} there"


def _commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each command, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def _command(words: list[str]) -> None:
    """Run a `shardwise` command in this process, which has already imported torch."""
    from shardwise.cli import main

    assert words[0] == "shardwise", f"{words[0]} cannot run; mark only blocks of shardwise"
    code: object = 0
    try:
        main(words[1:])
    except SystemExit as end:
        code = end.code
    assert not code, f"{shlex.join(words)}: exit {code}"


def without_errors(text: str) -> str:
    """Replace every relative error by the same word."""
    return ERROR.sub("ERROR", text)


def main(pages: list[str]) -> None:
    """Update the output in each page."""
    os.environ["COLUMNS"] = "100"
    sys.path.insert(0, str(ROOT))
    for page in (Path(name).resolve() for name in pages):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path("examples").symlink_to(ROOT / "examples")
            page.write_text(run_page(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
