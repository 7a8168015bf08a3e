"""The networks that extractors with a fixed name run, and the files of their weights."""
