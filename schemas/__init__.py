"""The contract: what datasets look like on disk, and how they are written, read and checked.

Needs the standard library, numpy and pyarrow only.
"""
