"""Logs: one line a record, for people to read or, as JSON, for programs.

Knows how lines look; deliberately not what is logged. A record may carry `fields`, which only JSON
shows: the message says as much as people need.
"""

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_log = logging.getLogger("stepdial")


class JsonLines(logging.Formatter):
    """Each record is one object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return _object(record.levelname, record.name, record.getMessage(), record.created, fields)


def set_up(log_format: LogFormat, level: str, access_log: bool) -> None:
    """Let every logger of the process write to standard error in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if access_log:
        logging.getLogger("stepdial.access").setLevel(logging.INFO)
    if log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread


def line(log_format: LogFormat, message: str, level: str = "INFO", **fields: Any) -> str:
    """What is said outside of the log, such as what is served, in the form of the log."""
    if log_format == "text":
        return message
    return _object(level, "stepdial", message.strip(), time.time(), fields)


def _object(level: str, name: str, message: str, at_s: float, fields: dict[str, Any]) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
    entry = {
        "time": f"{stamp}.{int(at_s % 1 * 1000):03d}Z",
        "level": level.lower(),
        "logger": name,
        "message": message,
    }
    return json.dumps(entry | fields, default=str)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _log.critical("uncaught: %s", error, exc_info=(kind, error, trace))


def _uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
    error = found.exc_value or found.exc_type()
    _log.critical(
        "uncaught in the thread %s: %s",
        found.thread.name if found.thread else "that has ended",
        error,
        exc_info=(found.exc_type, error, found.exc_traceback),
    )
