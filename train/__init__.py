"""Training from the shards: a package of its own, without Beam and without the extractors.

`train.loop.train` trains what `train.config.sections.resolve` describes, `train.runs.run.open_run` opens the
result. Nothing is imported here, so that the help of the command needs no torch.
"""
