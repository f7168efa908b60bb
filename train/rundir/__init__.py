"""A run's directory: who may write, which files there are, checkpoints, records and provenance."""
