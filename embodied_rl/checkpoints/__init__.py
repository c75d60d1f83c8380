"""Checkpoints: shards, their store and checksums, and resuming."""
