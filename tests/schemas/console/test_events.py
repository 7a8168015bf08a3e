import io
import json
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from schemas.console import events

ROOT = Path(__file__).parents[3]


@pytest.fixture
def log(monkeypatch):
    """Standard error as lines of JSON: a function that ends it and returns the events."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    def end(*arguments, **fields):
        events.finish(*arguments, **fields)
        return [json.loads(text) for text in stream.getvalue().splitlines()]

    events.start()
    yield end
    events.finish(0)


def without_time(event):
    assert datetime.fromisoformat(event.pop("time")).utcoffset() == timedelta(0)
    return event


@pytest.mark.parametrize(
    ("code", "status", "severity"),
    [
        (0, "done", "INFO"),
        *((code, "failed", "ERROR") for code in (1, 2, 77)),
        (3, "failures", "WARNING"),
        (130, "stopped", "WARNING"),
    ],
)
def test_last_event_has_the_exit_status(log, code, status, severity):
    assert events.emit("remark", message="größer", severity="WARNING") is True
    events.record(command="features", output="out", counts={"rows": 3})
    remark, last = map(without_time, log(code, "because"))
    assert remark == {"severity": "WARNING", "event": "remark", "message": "größer"}
    assert last == {
        "severity": severity,
        "event": "end",
        "command": "features",
        "output": "out",
        "counts": {"rows": 3},
        "status": status,
        "exit_code": code,
        "message": "because",
    }
    assert events.emit("remark", message="too late") is False


def test_nan_and_infinity_are_null():
    event = json.loads(
        events.line("progress", message="", loss=float("nan"), scores={"en": float("inf"), "de": 1.5}, path=Path("a"))
    )
    assert (event["loss"], event["scores"], event["path"]) == (None, {"en": None, "de": 1.5}, "a")


SCRIPT = """
import logging, os, subprocess, sys, warnings
logging.basicConfig()
from schemas.console import events
events.start()
events.record(output="o")
print("python says")
print("to stderr", file=sys.stderr)
os.write(2, b"from C++: caf\\xe9\\n")
warnings.warn("a warning")
logging.warning("a log")
subprocess.run([sys.executable, "-c", "import warnings; warnings.warn('of a worker')"])
os.write(2, b"\\r 10%\\r 100%\\n")
events.emit("remark", message="a remark")
os.write(2, b"without an end of line")
events.finish(3)
print("after the end", file=sys.stderr)
raise SystemExit(3)
"""


def test_all_standard_error_is_json_lines():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "python says\n")
    found = [without_time(json.loads(text)) for text in done.stderr.splitlines()]
    end = {"command": None, "output": "o", "counts": {}, "status": "failures", "exit_code": 3}
    assert found[-1] == {"severity": "WARNING", "event": "end", "message": "imagepivot: failures", **end}
    messages = "\n".join(event.get("message") or "" for event in found[:-1] if event["event"] == "warning")
    texts = ("to stderr", "from C++: caf\ufffd", "a warning", "a log", "UserWarning: of a worker", "100%", "without an end")
    assert [text for text in texts if text not in messages] == []
    assert " 10%" not in messages
    assert messages.count("a log") == 1
    assert {"severity": "INFO", "event": "remark", "message": "a remark"} in found
