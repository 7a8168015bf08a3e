"""What users bring, read without Beam: files, tables, captions and images."""
