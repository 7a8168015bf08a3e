"""Captions to tokens to ids: exact Moses text, vocabularies, encoding."""
