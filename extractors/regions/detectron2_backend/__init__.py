"""Optional detectron2 backend: regions of bottom-up attention and of other detectron2 models."""
