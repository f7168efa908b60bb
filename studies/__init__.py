"""Studies of learning: each runs what is missing of its comparison, and writes curves, a table and a picture."""
