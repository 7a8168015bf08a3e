"""Optional backend: bottom-up attention on detectron2's modules."""
