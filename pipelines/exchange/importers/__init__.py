"""Readers of features that other tools made: each opens the files of an `ImportJob` as `FeatureFiles`."""
