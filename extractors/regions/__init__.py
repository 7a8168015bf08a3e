"""Region extractors: boxes with a feature, a class and an attribute each."""
