"""A local worker process: Beam's own worker, which ends with the run that started it.

So a killed run leaves no process behind that still writes. `pipelines.running.runner` starts it.
"""

import logging
import os
import sys
import threading
import time
from pathlib import Path

from schemas.process.resources import keep_freed_memory


def _end_with_run(launcher: int, running: str) -> None:
    while os.getppid() == launcher and Path(running).exists():
        time.sleep(0.2)
    os._exit(1)


def main(launcher: int, running: str) -> None:
    """Start the worker. Ctrl-C, which reaches all processes, ends it silently: the launcher alone reports it.

    Args:
        launcher: process id of the launcher, whose child this process is.
        running: folder that exists as long as the run.
    """
    keep_freed_memory()
    threading.Thread(target=_end_with_run, args=(launcher, running), daemon=True).start()
    # Every failure reaches the launcher as an error; the log would only repeat it on the terminal, along with Beam's own notes.
    logging.disable(logging.ERROR)
    from apache_beam.runners.worker import sdk_worker, sdk_worker_main

    sdk_worker.print = lambda *_, **__: None  # Beam also prints the traceback of each such error.
    sdk_worker_main.main(sys.argv)
