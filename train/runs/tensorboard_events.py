"""TensorBoard events of a run: configuration, curves and best scores.

Events are written synchronously by the package's own ``RecordWriter``. The writer thread of torch's
``SummaryWriter`` loses events of a killed process, and prints a traceback when the disk is full.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from schemas.conversion import dump
from schemas.errors import UsageError
from schemas.storage.storage_errors import create_folder, storage_errors
from train.config.sections import parse_settings

EVENTS = "tensorboard"
"""Subfolder of the events in the folder of a run."""


class EventFile:
    """Event file of one process; TensorBoard merges those of a run.

    It begins with the configuration as text and as hyper-parameters.

    Args:
        step: step from which the run continues; TensorBoard hides later steps of earlier files.
        config: configuration as TOML.
        hparams: further hyper-parameters.

    Raises:
        UsageError: TensorBoard is not installed.
        DatasetError: the file cannot be written.
    """

    def __init__(self, folder: Path, step: int, config: str, hparams: Mapping[str, str | float | bool]) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UsageError(
                "TensorBoard is not installed: pip install 'imagepivot[train]', or leave its events out with --no-tensorboard"
            ) from error
        self._event, self._summary, self._record_writer = event_pb2.Event, summary_pb2.Summary, RecordWriter
        # TensorBoard reads the files in the order of their names.
        path = folder / EVENTS / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = str(path)
        with storage_errors(self._path):
            create_folder(path.parent)
            self._file = path.open("xb", buffering=0)
        self._add(file_version="brain.Event:2")
        self._add(step=step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        code_block = "".join(f"    {line}\n" for line in config.splitlines())
        self._add(step=step, summary=text_pb("config", code_block))
        settings = {
            name: dump(value) if isinstance(value, (dict, list)) else value for name, value in parse_settings(config).items()
        }
        self._add(step=step, summary=hparams_pb({**settings, **hparams}))

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write a point of each curve."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, **content: Any) -> None:
        record = io.BytesIO()
        self._record_writer(record).write(self._event(wall_time=time.time(), **content).SerializeToString())
        with storage_errors(self._path):
            write_all(self._file, record.getvalue())


def write_all(file: FileIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file, which may take fewer at a time."""
    while data:
        data = data[file.write(data) or 0 :]
