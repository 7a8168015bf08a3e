"""Extractors of one vector per image, or of one for each crop or cell of a grid."""
