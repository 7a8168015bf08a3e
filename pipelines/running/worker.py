"""Entry of a local worker process: our packages first, then Beam's own worker.

Run as a script by ``pipelines.running.runner``. The names of our packages are generic; a folder called ``schemas`` or a file
``train.py`` where the user stands, or on ``PYTHONPATH``, must not be imported in their place. The worker ends with the
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
    """Starts the worker."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - nothing is imported before the path is right
    # The script's own folder is first on the path: the modules of this package would hide top-level ones.
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path.insert(0, os.path.dirname(os.path.dirname(here)))  # noqa: PTH120
    import imagepivot  # noqa: F401 -- from now on the names of our packages mean ours

    sys.path.pop(0)
    # The runner starts a shell, the shell this process: the shell ends when the runner does.
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Ctrl-C reaches all processes; the launcher says what it means.
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    # What goes wrong reaches the launcher as an error; the log would only repeat it, and Beam's own notes, on the terminal.
    logging.disable(logging.ERROR)
    from apache_beam.runners.worker import sdk_worker, sdk_worker_main

    sdk_worker.print = lambda *_, **__: None  # Beam prints the traceback of each such error, too.
    sdk_worker_main.main(sys.argv)


if __name__ == "__main__":
    main()
