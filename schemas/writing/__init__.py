"""Writing, validation and repair of datasets."""
