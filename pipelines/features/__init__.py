"""Images to shards of features: the job, its workers, and the functions that write a shard."""
