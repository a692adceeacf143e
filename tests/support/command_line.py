"""Run the command line in this process."""

from __future__ import annotations

import pytest

from shardwise import cli


def run(capture: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run `shardwise ARGUMENTS` and return its exit code, output and errors."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, *capture.readouterr()


def unwrapped(text: str) -> str:
    """Return a message without line breaks and frames."""
    return " ".join(text.replace("│", " ").split())
