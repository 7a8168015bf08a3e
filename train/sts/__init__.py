"""Semantic textual similarity: sentence pairs, measured systems, reports."""
