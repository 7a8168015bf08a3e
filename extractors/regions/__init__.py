"""Extractors of regions: boxes, each with a feature, a class and an attribute."""
