"""Training from the shards, without Beam and without the extractors.

`train.loop.training.train` trains what a `train.jobs.TrainJob` describes, and `train.runs.run.open_run` opens
the result. Nothing is imported here, so that the help of the command needs no torch.
"""
