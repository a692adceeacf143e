"""Files that a command writes, with errors that say what to type for its option.

Enters: a path and a text. Leaves: the file, whole or not at all (`shardwise.files`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from shardwise import files


def write_whole(path: str | Path, text: str, *, option: str = "-o") -> None:
    """Write a file at once; errors say what to type for `option`."""
    files.write_text(path, text, hint=_cure(path, option))


def writing(path: str | Path, *, option: str = "-o") -> AbstractContextManager[None]:
    """Turn what the system refuses here into an error about `path`."""
    return files.writing(path, hint=_cure(path, option))


def require_writable(path: str | Path, *, option: str = "-o") -> None:
    """Refuse a path that cannot be written as a file, before long work."""
    files.require_writable(path, hint=_cure(path, option))


def _cure(path: str | Path, option: str) -> str:
    if Path(path).is_dir():
        return f"{option} {Path(path) / 'FILE'}"
    return f"{option} with a folder that you may write to"
