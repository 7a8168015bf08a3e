"""Readers of user files: text, tables, captions and images, without Beam."""
