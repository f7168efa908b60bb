"""Loops beside `train.rounds`, for other papers: several models at once, and pilot rounds."""
