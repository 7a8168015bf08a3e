"""Images to shards of features: the job, its workers, the writing of a shard."""
