"""From PyTorch to `Graph`: `capture(model, batch)`."""

from shardwise.batch import flatten_batch, rebuild_output
from shardwise.frontend.capture import capture
from shardwise.frontend.fake import skeleton
