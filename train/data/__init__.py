"""Captions and features as arrays, and the batches drawn from them. Only `train.data.torch_datasets` loads torch."""
