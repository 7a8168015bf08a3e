"""Extractors of one vector per image."""
