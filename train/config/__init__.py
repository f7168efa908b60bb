"""What a run is asked to do: the keys, their checks, names of directories, and the registries of parts."""
