"""A run's directory: its lock, files, checkpoints, records and provenance."""
