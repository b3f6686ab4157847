"""Measured releases: the metrics of each revision, and comparisons of two revisions."""
