"""Readers of raw captions."""
