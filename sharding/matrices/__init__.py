"""Matrices: singular terms, products of factors, storage in few bits, and activations."""
