"""What a model scientist touches: training, checkpoints, integrations."""
