"""PyTorch Lightning: `Trainer(strategy=ShardwiseStrategy("fsdp"))`.

`pip install 'shardwise[lightning]'`; `docs/guides/lightning.md` is the guide.
"""

from shardwise.integrations.lightning.step import step_batch, step_model
from shardwise.integrations.lightning.strategy import ShardwiseStrategy

__all__ = ["ShardwiseStrategy", "step_batch", "step_model"]
