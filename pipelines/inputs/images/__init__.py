"""Collections of images: folders, tables, tars and Parquet files."""
