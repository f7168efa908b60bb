"""Differential privacy of clients: the mechanism, the average that applies it, and the account of what it has spent."""
