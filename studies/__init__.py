"""Studies of learning: what is compared, run as far as it is missing, with curves, a table and a picture of each."""
