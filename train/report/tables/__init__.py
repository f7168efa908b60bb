"""The published tables and figures, run again cell by cell: `python -m train table N`."""
