"""The main job on an embedded default: drawn scenes with captions in four languages."""
