"""Singular terms of matrices: all of them, or the largest."""
