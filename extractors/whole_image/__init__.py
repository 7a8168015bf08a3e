"""Extractors of one vector per image, per crop or per grid cell."""
