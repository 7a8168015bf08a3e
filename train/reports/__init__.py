"""Tables: the papers' published numbers beside those measured."""
