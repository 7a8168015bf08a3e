"""The same regions, and those of any detectron2 model, where detectron2 is installed."""
