"""Singular terms of matrices: all, or the largest."""
