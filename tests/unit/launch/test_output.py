from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from shardwise.launch.run import Lines, Printer


@given(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"])), st.data())
def test_lines_do_not_depend_on_chunk_boundaries(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    bounds = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    lines = Lines()
    received = []
    for begin, end in zip([0, *bounds], [*bounds, len(raw)], strict=True):
        received += lines.feed(raw[begin:end])
    received += lines.end()
    expected = text.split("\n")
    if not expected[-1].strip(" \t\x0b\x0c"):
        expected.pop()
    assert received == expected


def test_a_redrawn_line_is_shown_as_on_a_terminal() -> None:
    lines = Lines()
    assert lines.feed(b"10%\r20%\r") == ["20%"]
    assert lines.feed(b"30%\r40%\r") == []  # too soon after the last one
    assert lines.feed(b"100%\ndone\r\n") == ["100%", "done"]
    assert lines.feed(b"part") == []
    assert lines.end() == ["part"]
    assert lines.end() == []


def test_invalid_utf8_and_very_long_lines_are_printed() -> None:
    lines = Lines()
    assert lines.feed(b"\xff\xfe\n") == ["\ufffd\ufffd"]
    (line,) = lines.feed(b"x" * (1 << 21))
    assert len(line) == 1 << 21


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_are_aligned_and_coloured_on_a_terminal() -> None:
    out, err = Terminal(), io.StringIO()
    printer = Printer(["a", "node10"], out, err)
    printer.write("a", ["x", "y"], to_err=False)
    printer.write("node10", ["z"], to_err=True)
    assert out.getvalue() == "\x1b[36m[a]\x1b[0m      x\n\x1b[36m[a]\x1b[0m      y\n"
    assert err.getvalue() == "[node10] z\n"
    assert printer.last("a") == ("x", "y")
