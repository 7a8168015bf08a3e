"""Optional backend: bottom-up attention and other models of detectron2."""
