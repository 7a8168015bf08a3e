"""Extractors of maps: one vector for each cell of a grid over the image."""
