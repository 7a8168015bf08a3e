"""Beam pipelines and the command line, importable without Beam and torch."""

import sys

# A remote worker first imports the module of its first function, in a folder where any module may shadow ours.
import imagepivot  # noqa: F401
from schemas.process.startup import keep_freed_memory

# On a worker, Beam's module started the process. In other programs the allocator is theirs.
if getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") == "apache_beam.runners.worker.sdk_worker_main":
    keep_freed_memory()
