"""Events for TensorBoard: configuration as text, hyper-parameters, the numbers of the log as curves, and the best scores.

Written here rather than by torch's ``SummaryWriter``, whose thread would print its own traceback when the disk is full.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from schemas.conversion import dump
from schemas.errors import UsageError
from schemas.storage.storage_errors import storage_errors
from train.config.sections import settings_of

EVENTS = "tensorboard"
"""The folder of the events, in that of the run."""


class EventFile:
    """A file of events, of one process; TensorBoard shows all those of a run together.

    Args:
        folder: folder of the run.
        step: step from which the run continues; events of later steps in other files are not shown any more.

    Raises:
        UsageError: TensorBoard is not installed.
        DatasetError: the file cannot be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UsageError(
                "TensorBoard is not installed: pip install 'imagepivot[train]', or leave its events out with --no-tensorboard"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # TensorBoard reads the files in the order of their names.
        path = folder / EVENTS / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = str(path)
        with storage_errors(self._path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)
        self._records = RecordWriter(_Whole(self._file))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(file_version="brain.Event:2")
        self._add(step=step + 1, session_log=start)

    def describe(self, config: str, more: Mapping[str, Any], step: int) -> None:
        """Write a configuration, as text and as hyper-parameters.

        Further hyper-parameters are numbers, text, or true or false.
        """
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        block = "".join(f"    {line}\n" for line in config.splitlines())  # Markdown of a block of code.
        self._add(step=step, summary=text_pb("config", block))
        settings = {
            name: dump(value) if isinstance(value, (dict, list)) else value for name, value in settings_of(config).items()
        }
        self._add(step=step, summary=hparams_pb({**settings, **more}))

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write a point of each curve."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._summary(value=values))

    def finish(self, *, succeeded: bool) -> None:
        """Write, for the table of hyper-parameters, how the process ended."""
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
        value = self._summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)
        self._add(summary=self._summary(value=[value]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, **content: Any) -> None:
        with storage_errors(self._path):
            self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


class _Whole:
    """A file without a buffer that writes all of what it is given."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        write_all(self._file, data)


def write_all(file: FileIO, data: bytes) -> None:
    """Write all bytes; a file without a buffer may take fewer at a time, the last before the disk is full."""
    while data:
        data = data[file.write(data) or 0 :]
