"""Files that are there as a whole, or not at all.

Enters: a path and a text. Leaves: the file.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import ShardwiseError


def write_whole(path: str | Path, text: str, *, option: str = "-o") -> None:
    """Write beside the file, then rename: whoever reads it finds the old one or the new one.

    Devices, pipes and links are written to as they are. Errors say what to type for `option`.
    """
    path = Path(path)
    require_writable(path, option=option)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with writing(path, option=option):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name[:64]}.", suffix=".part"
        )
    except OSError as error:
        raise _cannot(path, error, option) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise _cannot(path, error, option) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


@contextmanager
def writing(path: Path, *, option: str = "-o") -> Iterator[None]:
    """What the system refuses here is an error about `path`, with what to type for `option`."""
    try:
        yield
    except OSError as error:
        raise _cannot(path, error, option) from None


def require_writable(path: Path, *, option: str = "-o") -> None:
    """Refuse at once, before long work, what could not be written as a file."""
    with writing(path, option=option):
        above = next((folder for folder in path.absolute().parents if folder.exists()), path)
        for wrong, code in (
            (path.is_dir(), errno.EISDIR),
            (not above.is_dir(), errno.ENOTDIR),
            (not path.exists() and not os.access(above, os.W_OK), errno.EACCES),
        ):
            if wrong:
                raise OSError(code, os.strerror(code))


def _cannot(path: Path, error: OSError, option: str) -> ShardwiseError:
    hint = f"{option} with a folder that you may write to"
    if isinstance(error, IsADirectoryError):
        hint = f"{option} {path / 'FILE'}"
    return ShardwiseError(f"cannot write {path}: {error.strerror or error}", hint=hint)
