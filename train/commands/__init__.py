"""The commands that need a model: each module is a group, ``app``, whose commands turn arguments into jobs."""
