"""The command line: its commands, arguments, progress and lists."""
