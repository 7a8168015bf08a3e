"""The dataset format: schemas, writing, reading and validation.

Needs the standard library, numpy and pyarrow only.
"""
