"""Callbacks: what a run writes, logs and stops at."""

from train.callbacks.callback import Callback, EachRound, Plans, closing

__all__ = ["Callback", "EachRound", "Plans", "closing"]
