"""Beam pipelines and the command line. Importing this loads neither Beam nor torch: import the module that you need."""

import sys

# A worker on another machine begins with whatever module its first function is in, in a folder where any module may hide ours.
import imagepivot  # noqa: F401
from schemas.process.resources import keep_freed_memory

# On such a worker Beam's own module began the process. Elsewhere this is only an import, and the allocator is the program's.
if getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") == "apache_beam.runners.worker.sdk_worker_main":
    keep_freed_memory()
