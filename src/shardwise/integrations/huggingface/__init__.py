"""`ShardwiseTrainer`: `transformers.Trainer` on any plan.

It trains the same on any number of ranks, and its checkpoints are folders for `from_pretrained`.
"""

from shardwise.errors import ShardwiseError

try:
    import accelerate
    import transformers
except ImportError as error:
    raise ShardwiseError(
        f"the Hugging Face integration needs {error.name}, which is not installed",
        hint='pip install "shardwise[huggingface]"',
    ) from error

from shardwise.integrations.huggingface.trainer import ShardwiseTrainer

__all__ = ["ShardwiseTrainer"]
