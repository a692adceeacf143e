"""Program -> Python source."""

from shardwise.emit.executor import LoadedPipeline, build
from shardwise.emit.load import load
from shardwise.emit.pipeline import PipelineSources, emit_pipeline
from shardwise.emit.places import naming_places
from shardwise.emit.source import emit

__all__ = [
    "LoadedPipeline",
    "PipelineSources",
    "build",
    "emit",
    "emit_pipeline",
    "load",
    "naming_places",
]
