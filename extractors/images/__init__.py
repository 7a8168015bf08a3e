"""Image bytes to pixels: decoding, resizing, crops."""
