"""The command line: arguments, progress, lists, and an early handler for Ctrl-C."""
