"""Losses and the objective that a training minimises."""
