"""What the terminal shows: the command line, progress, lists, and an early line for Ctrl-C."""
