"""What a job on a cluster takes, before it is submitted: its graph, shards, hours, requests and cost."""
