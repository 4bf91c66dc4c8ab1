"""Pipelines: each rank runs some of the blocks, and replicas of a stage average gradients, or shard its state."""
