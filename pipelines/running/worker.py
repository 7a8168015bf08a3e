"""A local worker process: Beam's own worker, which ends with the process that started it.

So a killed run leaves no process behind that still writes. `pipelines.running.runner` starts it.
"""

import logging
import os
import signal
import sys
import threading
import time

__all__ = ["main"]


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Start the worker."""
    # The runner starts a shell and the shell this process; the shell ends when the runner does.
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Ctrl-C reaches all processes; the launcher alone reports it.
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    # Every failure reaches the launcher as an error; the log would only repeat it on the terminal, along with Beam's own notes.
    logging.disable(logging.ERROR)
    from apache_beam.runners.worker import sdk_worker, sdk_worker_main

    sdk_worker.print = lambda *_, **__: None  # Beam also prints the traceback of each such error.
    sdk_worker_main.main(sys.argv)
