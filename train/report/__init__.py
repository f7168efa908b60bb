"""What one looks at after training: a summary with its plot, and a page; all from what runs left behind."""

from train.report.history import History, megabytes
from train.report.summary import write_report

__all__ = ["History", "megabytes", "write_report"]
