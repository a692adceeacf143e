"""Program -> Python source."""

from shardwise.emit.executor import LoadedModule, LoadedPipeline, build, make_store
from shardwise.emit.load import load
from shardwise.emit.pipeline import PipelineSources, emit_pipeline
from shardwise.emit.places import naming_places
from shardwise.emit.source import emit

__all__ = [
    "LoadedModule",
    "LoadedPipeline",
    "PipelineSources",
    "build",
    "emit",
    "emit_pipeline",
    "load",
    "make_store",
    "naming_places",
]
