"""Rollouts: how the samples of a stage are cut into micro-batches and shards, and how shards become tables."""
