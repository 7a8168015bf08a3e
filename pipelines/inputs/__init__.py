"""Whatever users bring: files, tables, captions and images, read without Beam."""
