"""Metrics, scores, embeddings and search of trained models."""
