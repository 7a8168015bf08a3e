"""Training from the shards, without Beam and without the extractors.

`train.loop.train` trains what a `train.jobs.TrainJob` describes, and `train.runs.open_run` opens the result. Nothing is imported
here, so that the help of the command needs no torch.
"""
