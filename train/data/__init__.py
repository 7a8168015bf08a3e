"""Captions and features as arrays, and the batches drawn from them."""
