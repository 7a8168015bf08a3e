"""Readers of features of other tools."""
