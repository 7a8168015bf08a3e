"""Resolution and download of weights, safe readers, checks against a model."""
