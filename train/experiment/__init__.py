"""One experiment: its parts, how they are made from a configuration, and what each round measures."""
