"""Basics that all of `train` uses: files, lines of JSON, errors, signals, stages, clocks."""
