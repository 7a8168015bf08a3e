"""Writing datasets: the state of a folder, shards, the commit, and what checks and repairs them."""
