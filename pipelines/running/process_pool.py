"""Local worker processes, which call functions, and writers of shards in workers.

A worker is a new Python process rather than a fork, since the threads of the launcher may hold locks, and does not import the
user's script, as the processes of ``multiprocessing`` do. Functions and values travel as pickles over a socket pair each.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeAlias, TypeVar

from schemas.errors import ImagepivotError, UsageError, errno_of
from schemas.process.startup import keep_freed_memory, reduce_gc, skip_pandas
from schemas.writing.output import OutputDataset

_K = TypeVar("_K")
_T = TypeVar("_T")
_R = TypeVar("_R")

# A worker imports what the launcher can, e.g. classes in a module beside the user's script. `imagepivot` pins
# the names of our packages.
_START = (
    "import sys; sys.path[:] = {path!r}; import imagepivot; "
    "from pipelines.running.process_pool import serve; serve({launcher}, {socket})"
)

WORKER_INDEX = "IMAGEPIVOT_WORKER_INDEX"
"""Environment variable with the index of a worker, from 0."""

# Terminals and batch systems send them to all processes of a job. The launcher decides, and its end is the end of its workers.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PARENT_SECONDS = 0.2  # Between two looks at whether the launcher lives.


Share: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls its argument once per process, and returns that result in all threads (`apache_beam.utils.shared.Shared.acquire`)."""


class ShardWorker(ABC):
    """Writer of shards in a worker process; picklable before `set_up`."""

    output: OutputDataset
    _is_set_up = False

    @abstractmethod
    def set_up(self, share: Share) -> None:
        """Load the state for all shards; ``share`` loads the part that threads share."""

    @abstractmethod
    def write(self, shard: Any) -> int:
        """Write a shard, given its index, or index and inputs; return its index."""

    def __call__(self, shard: Any) -> int:
        """Write a shard in a local worker, which is set up before its first."""
        if not self._is_set_up:
            self.set_up(lambda load: load())
            self._is_set_up = True
        return self.write(shard)


class Map(Protocol):
    """The built-in ``map``, or one that yields results in any order."""

    def __call__(self, function: Callable[[_T], _R], values: Iterable[_T], /) -> Iterator[_R]:
        """Call the function; it ends when all results are taken."""


@contextmanager
def open_workers(count: int) -> Iterator[Map]:
    """Yield a `Map` over so many processes, which end with the block.

    One worker is this process. Otherwise a function and its values are pickled. A worker unpickles a function
    once, so that it may keep what it loads. If it fails, its error is raised here.
    """
    if count == 1:
        yield map
        return
    workers: list[Worker] = []
    try:
        workers += [Worker(index) for index in range(count)]
        yield partial(_spread, workers)
    finally:
        for worker in workers:
            worker.kill()


class LostWorkerError(ImagepivotError):
    """A worker process ended before its answer."""


class Worker:
    """A worker process, seen from its launcher."""

    def __init__(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            script = _START.format(path=sys.path, launcher=os.getpid(), socket=theirs.fileno())
            # Arrow's default pool would keep freed memory; the worker configures malloc.
            pools = {"ARROW_DEFAULT_MEMORY_POOL": os.environ.get("ARROW_DEFAULT_MEMORY_POOL", "system")}
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # The process inherits it, for its start.
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", script],
                    env={**os.environ, **pools, WORKER_INDEX: str(index)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.connection = Connection(ours.detach())

    def send(self, content: bytes) -> None:
        """Send a pickle.

        Raises:
            LostWorkerError: the process has ended.
        """
        try:
            self.connection.send_bytes(content)
        except OSError:
            raise _lost_worker() from None

    def receive(self) -> Any:
        """Return the result of a call, or raise its error.

        Raises:
            LostWorkerError: the process has ended.
        """
        try:
            result, error, number = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise _lost_worker() from None
        if error is not None:
            raise error from (None if number is None else OSError(number, os.strerror(number)))
        return result

    def kill(self) -> int:
        """End the process, whatever it does; return its exit code, negative for a signal."""
        self.connection.close()
        self._process.kill()
        return self._process.wait()


def _spread(workers: list[Worker], function: Callable[[_T], _R], values: Iterable[_T], /) -> Iterator[_R]:
    """Call a function in processes; each gets the next value when it is idle."""
    try:
        content = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(error) from error
    todo = iter(values)
    busy: dict[Connection, Worker] = {}

    def start_next(worker: Worker) -> None:
        for value in todo:
            worker.send(pickle.dumps(value))
            busy[worker.connection] = worker
            return

    for worker in workers:
        worker.send(content)
        start_next(worker)
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy.pop(connection)
            result = worker.receive()
            start_next(worker)
            yield result
    for worker in workers:
        worker.send(b"")  # The next pickle is a function.


def by_key(pairs: Iterable[tuple[_K, _R]]) -> dict[_K, list[_R]]:
    """Return the values of each key, in order, e.g. to hand on results."""
    values: defaultdict[_K, list[_R]] = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return values


def _lost_worker() -> LostWorkerError:
    return LostWorkerError(
        "a worker process ended unexpectedly: it was killed, or ran out of memory. Finished shards are kept; "
        "run the same command again, with fewer --workers if memory is short"
    )


def _not_importable(error: Exception) -> UsageError:
    return UsageError(
        f"worker processes cannot import a part of this job ({error}): define it in a module of its own, or give --workers 1"
    )


# --- in a worker ------------------------------------------------------------------------------------------------------


def serve(launcher: int, descriptor: int) -> None:
    """Call functions for the launcher until it ends, or kills this process.

    Args:
        launcher: its process id.
        descriptor: file descriptor of this end of the socket pair.
    """
    for signum in _STOPPING:
        signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    keep_freed_memory()
    reduce_gc()
    skip_pandas()
    connection = Connection(descriptor)
    with suppress(EOFError, OSError):  # The launcher has gone.
        while True:
            _serve_function(connection, connection.recv_bytes())


def _serve_function(connection: Connection, content: bytes) -> None:
    function = None
    while value := connection.recv_bytes():
        try:
            function = function or _unpickle(content)
            answer = pickle.dumps((function(pickle.loads(value)), None, None))
        except BaseException as error:  # noqa: BLE001  # The launcher raises it.
            error.add_note(f"In a worker process:\n{''.join(traceback.format_exception(error))}")
            answer = _pickled_error(error)
        connection.send_bytes(answer)


def _unpickle(content: bytes) -> Callable[[Any], Any]:
    try:
        function: Callable[[Any], Any] = pickle.loads(content)
    except (AttributeError, ImportError) as error:  # E.g. a class of the user's script.
        raise _not_importable(error) from error
    return function


def _pickled_error(error: BaseException) -> bytes:
    number = errno_of(error)  # A pickle of an error lacks its cause.
    try:
        content = pickle.dumps((None, error, number))
        pickle.loads(content)  # Some errors cannot be made anew from their arguments.
    except Exception:  # noqa: BLE001
        return pickle.dumps((None, RuntimeError("\n".join(error.__notes__)), number))
    return content


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)
