"""Devices, precisions, parallel forwards, memory, fused and Winograd convolutions."""
