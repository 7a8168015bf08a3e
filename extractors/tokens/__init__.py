"""Tokens of captions to arrays: pretrained models of text, such as BERT."""
