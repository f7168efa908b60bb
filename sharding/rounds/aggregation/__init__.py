"""The server after training: it checks and averages the updates."""
