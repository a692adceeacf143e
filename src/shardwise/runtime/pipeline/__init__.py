"""Steps of stages and micro-batches: the schedule, its messages, deferred weight gradients."""
