"""The demonstration: every step on drawn scenes with captions in four languages."""
