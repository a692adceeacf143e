"""What a config names: `package.module:function`, `file.py:function`, or a name of torch's own.

Enters: a `Named`, or an object that a Python caller gave in its place. Leaves: the object, called
with its arguments. A file is looked for beside the config, then in the current folder; its code is
the user's own program, and runs. A name without a colon is looked up, never imported from anywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError, ShardwiseError, did_you_mean, failed
from shardwise.training.config import Named

__all__ = [
    "build",
    "find_class",
    "find_file",
    "load_function",
    "load_object",
    "make",
    "module_is_missing",
]

DEBUG = "shardwise --debug …"


def build(part: Any, key: str, base: Path | None = None) -> Any:
    """The object that a config's field stands for: called, if it is named."""
    if not isinstance(part, Named):
        return part
    found = load_object(part.name, key, base)
    if not callable(found) and not part.args:
        return found
    return make(found, resolved(part.args, key, base), key, part.name)


def load_function(part: Any, key: str, base: Path | None = None) -> Any:
    """A function that is used, not called, when it is named; with arguments it is called first."""
    if not isinstance(part, Named):
        return part
    return build(part, key, base) if part.args else load_object(part.name, key, base)


def make(function: Callable[..., Any], args: Mapping[str, Any], key: str, name: str = "") -> Any:
    """Call with arguments that were checked against its signature first."""
    name = name or getattr(function, "__name__", str(function))
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, nothing to call", where=key)
    check_arguments(function, args, key, name)
    try:
        return function(**args)
    except ShardwiseError:
        raise
    except Exception as error:
        raise failed(ConfigError, f"{key}: {name}", error, DEBUG) from error


def check_arguments(
    function: Callable[..., Any], args: Mapping[str, Any], key: str, name: str, given: int = 0
) -> None:
    """Say which argument is unknown or missing; the first `given` are passed by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    parameters = list(signature.parameters.values())[given:]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for argument in args:
            if argument not in named:
                near = did_you_mean(argument, named)
                raise ConfigError(
                    f"{name} has no argument {argument!r}{near}",
                    where=f"{key}.args",
                    hint=", ".join(named) or "no arguments",
                )
    for parameter in parameters:
        needed = parameter.name in named and parameter.default is parameter.empty
        if needed and parameter.name not in args:
            raise ConfigError(
                f"{name} needs {parameter.name!r}",
                where=f"{key}.args",
                hint=f"{key}: {{name: {name}, args: {{{parameter.name}: …}}}}",
            )


def resolved(args: Mapping[str, Any], key: str, base: Path | None = None) -> dict[str, Any]:
    """Arguments, with `{import: file.py:function}` as what it names."""
    return {
        name: load_object(value["import"], f"{key}.args.{name}", base)
        if isinstance(value, Mapping) and list(value) == ["import"]
        else value
        for name, value in args.items()
    }


def find_class(name: Any, module: ModuleType, key: str, base: Path | None = None) -> Any:
    """A class by its name in a module of torch, by import path, or itself."""
    if not isinstance(name, str):
        return name
    if ":" in name:
        return load_object(name, key, base)
    known = [n for n in dir(module) if inspect.isclass(getattr(module, n)) and n[0].isupper()]
    if name not in known:
        alike = [each for each in known if each.lower() == name.lower()]
        raise ConfigError(
            f"no {name!r} in {module.__name__}{did_you_mean((alike or [name])[0], known)}",
            where=key,
            hint="a class of your own is file.py:Class or package.module:Class",
        )
    return getattr(module, name)


def find_file(path: str, base: Path | None = None) -> Path:
    """A file beside the config, or in the current folder."""
    beside = base / path if base is not None else Path(path)
    return beside if os.path.exists(beside) else Path(path)


def load_object(name: Any, key: str, base: Path | None = None) -> Any:
    """What `package.module:function` or `file.py:function` names."""
    module_name, colon, attribute = str(name).rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"{name!r} names nothing", where=key, hint="file.py:function or package.module:function"
        )
    module = _load_module(module_name, key, base)
    found: Any = module
    for each in attribute.split("."):
        if not hasattr(found, each):
            near = did_you_mean(each, [n for n in dir(found) if not n.startswith("_")])
            raise ConfigError(f"{module_name} has no {each!r}{near}", where=key)
        found = getattr(found, each)
    return found


def module_is_missing(name: str) -> bool:
    """Return whether no module of this name can be found, here or installed."""
    _see_folders(None)
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:
        return error.name is None or name.startswith(error.name)
    except (ImportError, ValueError, AttributeError):
        return False  # importing it says what is wrong


def _see_folders(base: Path | None) -> None:
    """Import from the config's folder and the current one first, as `python -m` does."""
    for folder in (Path.cwd(), base):
        if folder is not None and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def _load_module(name: str, key: str, base: Path | None) -> ModuleType:
    is_file = name.endswith(".py")
    path = find_file(name, base)
    if is_file and not os.path.isfile(path):
        places = f"{base} and {Path.cwd()}" if base is not None else str(Path.cwd())
        raise ConfigError(f"no file {name} in {places}", where=key)
    if not is_file and name.startswith("."):
        raise ConfigError(
            f"{name!r} is a relative import without a package",
            where=key,
            hint="package.module:function, with the package's name",
        )
    _see_folders(base)
    try:
        return _load_file(path.resolve()) if is_file else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if is_file or error.name is None or not name.startswith(error.name):
            raise failed(ConfigError, f"{key}: importing {name}", error, DEBUG) from error
        raise ConfigError(
            f"no module {error.name!r}",
            where=key,
            hint="pip install it, set PYTHONPATH, or name a file: file.py:function",
        ) from None
    except Exception as error:
        raise failed(ConfigError, f"{key}: importing {name}", error, DEBUG) from error


def _load_file(path: Path) -> ModuleType:
    """The module of a file, once; its folder can be imported from, as when it is run."""
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # A file may be called as a module that is in use, such as `random.py`: that one stays.
    if known is None:
        sys.modules[path.stem] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        if known is None:
            sys.modules.pop(path.stem, None)
        raise
    return module
