"""Regions by detectron2, if that is installed: those of bottom-up attention, and those of other detectron2 models."""
