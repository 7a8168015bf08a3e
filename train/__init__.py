"""Training from the shards: a package of its own, without Beam and without the extractors. Nothing is in here yet."""
