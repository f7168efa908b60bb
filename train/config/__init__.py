"""The configuration of a run: its keys and their checks, names of directories, and the registries of parts."""
