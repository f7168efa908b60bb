"""What looks on at a run: files, checkpoints, trackers, progress, and reasons to stop."""

from train.callbacks.base import Callback, EachRound, FinishedRound, closing

__all__ = ["Callback", "EachRound", "FinishedRound", "closing"]
