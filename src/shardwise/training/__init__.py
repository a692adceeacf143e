"""Train models from a config: data, steps, evaluation, logs and export."""
