"""What happens after each round: files, checkpoints, trackers, progress, and early stopping."""

from train.callbacks.base import Callback, EachRound, FinishedRound, closing

__all__ = ["Callback", "EachRound", "FinishedRound", "closing"]
