"""The ground that everything in `train` stands on: files, lines of JSON, errors, signals, stages, clocks."""
