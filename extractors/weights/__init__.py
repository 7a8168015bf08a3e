"""Weights: finding them, reading checkpoints safely, recognising what they are."""
