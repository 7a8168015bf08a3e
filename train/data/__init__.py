"""Captions, features and batches as arrays; only `torch_datasets` loads torch."""
