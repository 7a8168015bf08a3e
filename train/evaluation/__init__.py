"""Metrics, scores, embeddings, search and textual similarity of trained models."""
