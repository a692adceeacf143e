"""Files that are there as a whole, or not at all.

Enters: a path and a text. Leaves: the file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwise.errors import ShardwiseError


def write_whole(path: str | Path, text: str) -> None:
    """Write beside the file, then rename: whoever reads it finds the old one or the new one."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name[:64]}.", suffix=".part"
        )
    except OSError as error:
        raise _cannot(path, error) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise _cannot(path, error) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def _cannot(path: Path, error: OSError) -> ShardwiseError:
    return ShardwiseError(
        f"cannot write {path}: {error.strerror or error}",
        hint="-o with a folder that you may write to",
    )
