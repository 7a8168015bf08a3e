"""Beam worker in a local process, which exits even if its launcher is killed.

`pipelines.running.runner` starts it.
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
    """Run the worker; Ctrl-C, which reaches all processes, ends it silently.

    ``launcher`` is the process id of its parent. The folder ``running`` exists during the run.
    """
    keep_freed_memory()
    threading.Thread(target=_end_with_run, args=(launcher, running), daemon=True).start()
    # The launcher raises every failure; the log would repeat it on the terminal.
    logging.disable(logging.ERROR)
    from apache_beam.runners.worker import sdk_worker, sdk_worker_main

    sdk_worker.print = lambda *_, **__: None  # Beam also prints the traceback of each such error.
    sdk_worker_main.main(sys.argv)
