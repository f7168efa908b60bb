"""Tools for any torch module: its state, copies, wrappers, and whether its values are finite."""
