"""Where images come from: folders, tables, tars and Parquet files."""
