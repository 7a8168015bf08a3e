"""Readers of features of other tools: each opens the files of an `ImportJob` as `FeatureFiles`."""
