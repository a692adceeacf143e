"""Lower resolved plans to the programs that ranks run."""

from shardwise.program.lower import lower
from shardwise.program.pipeline import Pipeline, build_pipeline
from shardwise.program.program import LocalValue, Program, RankProgram, Step, Storage
