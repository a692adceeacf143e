"""Read files with limits, and write them atomically.

All files are read through `read_text`, `parse_json` or `compose_yaml`. They limit the size, the
nesting and the number of values before processing them, so that a hostile or corrupt file causes an
error within seconds and never a hang, an endless recursion or gigabytes of memory. YAML aliases
count each time they are used. Numbers that are not finite, duplicate keys and text that is not
UTF-8 are errors, too.

All files are written through `write_text`, which renames a finished file into place: after a full
disk or a kill the old file is still there. Errors of the operating system are raised as the
caller's kind of `ShardwiseError`, with the path, the reason and what to try.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import select
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardwise.errors import ErrorKind, ShardwiseError

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 64 << 20  # of a file that a person or a plan search wrote
MAX_DEPTH = 64  # of nested lists and mappings
MAX_VALUES = 4_000_000  # per file, with YAML aliases expanded
MAX_INTEGER = 1 << 64  # larger sizes and seeds would overflow
_WAIT_S = 5.0  # for the next bytes of a pipe
_SURROGATE = re.compile(r"\\[uU](?:0000)?[dD][89a-fA-F]")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# ------------------------------------------------------------ reading
def read_text(
    path: str | Path,
    error: ErrorKind = ShardwiseError,
    *,
    what: str = "file",
    hint: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """Return the text of a UTF-8 file of at most `max_bytes` bytes.

    Pipes such as `<(command)` in a shell work, too; a pipe that sends nothing is an error.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = _read_bytes(handle, max_bytes)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise error(f"there is no {what} {path}", hint=hint) from None
    except IsADirectoryError:
        raise error(f"{path} is a folder, not a {what}", hint=hint) from None
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the path
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"cannot read {path}: {reason}", hint=hint) from None
    if len(data) > max_bytes:
        raise error(f"{path} has more than {max_bytes:,} bytes, the limit for a {what}", hint=hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"{path} is not UTF-8 text: byte {problem.start} is 0x{data[problem.start]:02x}",
            where=str(path),
            hint=hint,
        ) from None


def _read_bytes(handle: int, max_bytes: int) -> bytes:
    if stat.S_ISDIR(os.fstat(handle).st_mode):
        raise IsADirectoryError
    waits = not stat.S_ISREG(os.fstat(handle).st_mode)
    poll = select.poll()
    if waits:
        poll.register(handle, select.POLLIN)
    pieces, size = [], 0
    while size <= max_bytes:
        if waits and not poll.poll(_WAIT_S * 1000):
            raise TimeoutError(errno.ETIMEDOUT, f"no data for {_WAIT_S:g} s")
        piece = os.read(handle, min(1 << 20, max_bytes + 1 - size))
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def read_json(
    path: str | Path,
    error: ErrorKind = ShardwiseError,
    *,
    what: str = "file",
    hint: str | None = None,
    max_bytes: int = MAX_BYTES,
    free: bool = False,
) -> Any:
    """Return the JSON value of a file; `free` is as in `parse_json`."""
    text = read_text(path, error, what=what, hint=hint, max_bytes=max_bytes)
    return parse_json(text, error, where=str(path), hint=hint, free=free)


def parse_json(
    text: str | bytes,
    error: ErrorKind = ShardwiseError,
    *,
    where: str,
    hint: str | None = None,
    free: bool = False,
    max_values: int = MAX_VALUES,
) -> Any:
    """Return the value of a JSON text.

    With `free`, numbers may have any size and may be NaN or infinite, for data that the user's code
    wrote and reads again.
    """

    def fail(message: str, place: str = where) -> NoReturn:
        raise error(message, where=place, hint=hint)

    if isinstance(text, bytes | bytearray):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            fail(f"not UTF-8 text: byte {problem.start} is 0x{text[problem.start]:02x}")
    # Every value but the first follows one of these, which bounds their number without parsing.
    count = 1 + sum(text.count(opener) for opener in ",[{")
    if count > max_values:
        fail(f"up to {count:,} values, more than the limit of {max_values:,}")
    decoder = json.JSONDecoder(
        object_pairs_hook=_distinct,
        parse_int=int if free else _bounded_int,
        parse_float=float if free else _finite_float,
        parse_constant=float if free else _refused_constant,
    )
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as problem:
        fail(f"not JSON: {problem.msg}", f"{where}:{problem.lineno}")
    except RecursionError:
        fail(f"unsupported JSON: lists and objects are nested more than {MAX_DEPTH} deep")
    except ValueError as problem:
        fail(f"unsupported JSON: {problem}")
    _require_shallow(value, fail, texts=_SURROGATE.search(text) is not None)
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return values


def _bounded_int(text: str) -> int:
    value = int(text) if len(text) <= 21 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise ValueError(f"the number {text[:24]}{'…' * (len(text) > 24)} is too large")
    return value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:24]} is not finite")
    return value


def _refused_constant(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _require_shallow(value: Any, fail: Any, *, texts: bool) -> None:
    """Refuse deep nesting, and text with unpaired surrogates, which cannot be encoded."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if texts:
            for item in level:
                for text in item if isinstance(item, dict) else (item,):
                    if isinstance(text, str) and not _is_unicode(text):
                        fail(f"{text[:40]!r} is not Unicode text")
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
            if texts or isinstance(inner, dict | list)
        ]
        if not level:
            return
    fail(f"lists and objects are nested more than {MAX_DEPTH} deep")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def compose_yaml(
    text: str, error: ErrorKind, *, where: str, loader: Any, max_values: int = MAX_VALUES
) -> yaml.Node | None:
    """Return the node tree of a YAML text; `loader` is a loader class of PyYAML.

    The text is first parsed as a stream of events, which needs neither recursion nor memory, to
    check the nesting and the number of values before any of them is built.
    """
    import yaml

    try:
        _require_small(yaml.parse(text, Loader=loader), max_values)
        root: yaml.Node | None = yaml.compose(text, Loader=loader)
        return root
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = where if mark is None else f"{where}:{mark.line + 1}"
        reason = getattr(problem, "problem", None) or str(problem).partition("\n")[0]
        raise error(f"not plain YAML: {reason}", where=place) from None
    except (RecursionError, ValueError, TypeError) as problem:
        raise error(f"not plain YAML: {problem}", where=where) from None


def _require_small(events: Any, max_values: int) -> None:
    """Refuse deep nesting, and aliases that expand to too many values."""
    import yaml

    def fail(problem: str, event: Any) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    sizes: dict[str, int] = {}  # number of values of each anchor
    open_parts: list[tuple[str | None, int]] = []  # anchors, and the number of values before them
    count = 0
    for event in events:
        count += isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.ScalarEvent):
            if not _is_unicode(event.value):
                fail("text that is not Unicode", event)
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                fail(f"the alias *{event.anchor} has no anchor before it", event)
            count += sizes[event.anchor] - 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_parts.append((event.anchor, count - 1))
            if len(open_parts) > MAX_DEPTH:
                fail(f"lists and mappings are nested more than {MAX_DEPTH} deep", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_parts.pop()
            if anchor:
                sizes[anchor] = count - before
        if count > max_values:
            fail(f"more than {max_values:,} values with aliases expanded", event)


# ------------------------------------------------------------ writing
def write_text(
    path: str | Path, text: str, error: ErrorKind = ShardwiseError, *, hint: str | None = None
) -> None:
    """Write a text as UTF-8, see `write_bytes`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"), error, hint=hint)


def write_bytes(
    path: str | Path, data: bytes, error: ErrorKind = ShardwiseError, *, hint: str | None = None
) -> None:
    """Write a file atomically: readers see the old or the complete new file, even after a kill.

    Missing folders are created and links are followed; devices and pipes are written directly.
    """
    with writing(path, error, hint=hint):
        target = Path(os.path.realpath(path))
        require_writable(target, error, hint=hint)
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        handle, fresh = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name[:64]}.", suffix=".part"
        )
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(fresh, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(fresh)
            raise


def _umask() -> int:
    mask = os.umask(0)  # it can only be read by setting it
    os.umask(mask)
    return mask


@contextmanager
def writing(
    path: str | Path, error: ErrorKind = ShardwiseError, *, hint: str | None = None
) -> Iterator[None]:
    """Turn operating system errors while `path` is written into an `error` about it."""
    try:
        yield
    except OSError as problem:
        raise write_error(path, problem, error, hint=hint) from None


def require_writable(
    path: str | Path, error: ErrorKind = ShardwiseError, *, hint: str | None = None
) -> None:
    """Refuse a path that cannot be written as a file, to fail before long work."""
    path = Path(path)
    with writing(path, error, hint=hint):
        above = next((folder for folder in path.absolute().parents if folder.exists()), path)
        for is_refused, code in (
            (path.is_dir(), errno.EISDIR),
            (not above.is_dir(), errno.ENOTDIR),
            (bool(os.statvfs(above).f_flag & os.ST_RDONLY), errno.EROFS),
            (not os.access(path if path.exists() else above, os.W_OK), errno.EACCES),
        ):
            if is_refused:
                raise OSError(code, os.strerror(code))


def write_error(
    path: str | Path,
    problem: OSError,
    error: ErrorKind = ShardwiseError,
    *,
    hint: str | None = None,
) -> ShardwiseError:
    """Return an error with the reason why a file cannot be written, and what to try."""
    reason = problem.strerror or str(problem)
    cure = hint or "a writable folder"
    if problem.errno in _FULL:
        with suppress(OSError):
            above = next(p for p in Path(path).absolute().parents if p.exists())
            reason += f" ({shutil.disk_usage(above).free:,} bytes free)"
        cure = "free some space or raise the quota, or choose another folder"
    elif problem.errno == errno.EISDIR:
        cure = f"{Path(path) / 'FILE'}: this is a folder" if hint is None else hint
    return error(f"cannot write {path}: {reason}", hint=cure)
