"""The demonstration: all steps on drawn scenes with captions in four languages."""
