"""The actor's engine: sharding, optimiser, update, checkpoints."""
