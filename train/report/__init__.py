"""Reports after training: a summary with its plot, and a page, from the files of the runs."""
