"""Examples: parts of your own, and the library in a script."""
