"""Weights: resolution and download, safe readers of checkpoints, checks against a model."""
