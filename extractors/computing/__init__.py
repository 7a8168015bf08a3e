"""Devices and precisions, passes over batches, memory."""
