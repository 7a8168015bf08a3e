"""What a machine, a bucket or a cluster can do: one module per subject, whose checks return findings."""
