"""Read training configs from YAML files, keyword arguments and `--set a.b=c`."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.files import read_text
from shardwise.schema import Reader, parse_yaml
from shardwise.training.config import TrainConfig

__all__ = ["config_from", "load_config", "with_overrides"]

MAX_BYTES = 1 << 20  # of a config
MAX_VALUES = 20_000  # in one, with every alias expanded


def load_config(path: str | Path, overrides: Sequence[str] = (), **changes: Any) -> TrainConfig:
    """Read the config in a file; `overrides` are texts `a.b=c`, `changes` values of fields."""
    path = Path(path)
    hint = "shardwise train config.yaml"
    text = read_text(path, ConfigError, what="config", hint=hint, max_bytes=MAX_BYTES)
    data, lines = parse_yaml(text, ConfigError, where=str(path), max_values=MAX_VALUES)
    reader = Reader(ConfigError, str(path), lines)
    if not isinstance(data, Mapping):
        reader.read(TrainConfig, data)  # raises
    values = {**data, **{name: value for name, value in changes.items() if value is not None}}
    config: TrainConfig = reader.read(TrainConfig, with_overrides(values, overrides))
    return config


def config_from(values: Mapping[str, Any]) -> TrainConfig:
    """Return the config of keyword arguments."""
    config: TrainConfig = Reader(ConfigError, "sw.Trainer", call=True).read(TrainConfig, values)
    return config


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with those of `a.b=c` put in their places.

    >>> with_overrides({"optimizer": "SGD"}, ["optimizer.args.lr=1e-2"])
    {'optimizer': {'name': 'SGD', 'args': {'lr': 0.01}}}
    """
    result: Any = dict(values)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{text!r} is not KEY=VALUE", hint="--set optimizer.args.lr=1e-3")
        item, _ = parse_yaml(value, ConfigError, where=f"--set {key}", max_values=MAX_VALUES)
        result = _put(result, key.split("."), item, key)
    return typing.cast(dict[str, Any], result)


def _put(into: Any, keys: list[str], value: Any, whole: str) -> Any:
    if not keys:
        return value
    first, *rest = keys
    if isinstance(into, list | tuple):
        if not first.isdigit() or int(first) >= len(into):
            raise ConfigError(
                f"index {first!r} is out of range for a list of length {len(into)}",
                where=f"--set {whole}",
            )
        items = list(into)
        items[int(first)] = _put(items[int(first)], rest, value, whole)
        return items
    if into is None:
        into = {}
    elif not isinstance(into, Mapping):
        into = {"name": into}  # the short form of an object with a name
    return {**into, first: _put(into.get(first), rest, value, whole)}
