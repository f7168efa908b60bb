"""Reports after training: a summary with its plot, and a page, from the files of the runs."""

from train.report.history import History
from train.report.summary import write_report

__all__ = ["History", "write_report"]
