"""Entry point of a local worker process: resolve our packages first, then start Beam's own worker.

``pipelines.running.runner`` runs this file as a script. The names of our packages are generic; a folder ``schemas`` or a file
``train.py`` in the user's current folder, or on ``PYTHONPATH``, must not be imported in their place. The worker ends with the
process that started it, so that a killed run leaves no process behind that still writes.
"""

import logging
import os
import signal
import sys
import threading
import time


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Start the worker."""
    script_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no import before the path is right
    # The script's own folder is first on the path: the modules of this package would hide top-level ones.
    sys.path[:] = [entry for entry in sys.path if entry != script_folder]
    sys.path.insert(0, os.path.dirname(os.path.dirname(script_folder)))  # noqa: PTH120
    import imagepivot  # noqa: F401 -- from here on, the names of our packages mean ours

    sys.path.pop(0)
    # The runner starts a shell and the shell this process; the shell ends when the runner does.
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Ctrl-C reaches all processes; the launcher alone reports it.
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    # Every failure reaches the launcher as an error; the log would only repeat it on the terminal, along with Beam's own notes.
    logging.disable(logging.ERROR)
    from apache_beam.runners.worker import sdk_worker, sdk_worker_main

    sdk_worker.print = lambda *_, **__: None  # Beam also prints the traceback of each such error.
    sdk_worker_main.main(sys.argv)


if __name__ == "__main__":
    main()
