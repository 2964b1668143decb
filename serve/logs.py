"""Logs: one line per record, as text for people or as JSON for programs.

Logging never waits for the reader: lines go through a queue, and lines that do not fit are dropped
and counted. A record may carry `fields`, which only the JSON format shows.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Bytes that may wait for one file; a pipe takes 64 KiB more.
_MOST_BYTES = 2**20
_AT_ONCE_BYTES = 2**16
_BLOCKED_S = 0.05
# How long the end of the process waits for unwritten lines.
_LAST_LINES_S = 1.0
_log = logging.getLogger("stepdial")


class LineWriter:
    """Writes lines to a file descriptor on a thread of its own."""

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        """`failed` is called when writing fails, once until it works again."""
        self._descriptor = descriptor
        self._failed = failed
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._writing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._fails = False

    def open(self) -> None:
        """Start the thread."""
        if not self._thread.is_alive():
            self._thread.start()

    def put(self, lines: str) -> None:
        """Queue these lines; drop them if the queue is full."""
        text = lines.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._bytes + len(text) > _MOST_BYTES:
                _count_dropped(text)
                return
            self._waiting.append(text)
            self._bytes += len(text)
            self._changed.notify_all()

    def flush(self, within_s: float) -> None:
        """Wait until everything is written, at most this long."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing), within_s)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                lines = b""
                while self._waiting and len(lines) < _AT_ONCE_BYTES:
                    lines += self._waiting.popleft()
                self._bytes -= len(lines)
                self._writing = True
            try:
                while lines:
                    try:
                        lines = lines[os.write(self._descriptor, lines) :]
                    except BlockingIOError:  # another process made it non-blocking
                        time.sleep(_BLOCKED_S)
                self._fails = False
            except OSError as error:
                _count_dropped(lines)
                if not self._fails:
                    self._fails = True
                    self._failed(error)


# If standard error fails there is nowhere to report it.
_errors = LineWriter(2, lambda error: None)
_output = LineWriter(1, lambda error: _log.warning("cannot write to standard output: %s", error))
_tell_dropped: Callable[[int], None] | None = None


def tell_dropped(listener: Callable[[int], None]) -> None:
    """Call this with the number of lines whenever some are dropped."""
    global _tell_dropped
    _tell_dropped = listener


def write_stdout(text: str) -> None:
    """Queue text for standard output."""
    _output.put(text)


def flush() -> None:
    """Wait a moment for what is not written yet: the reader may be stuck."""
    end_s = time.monotonic() + _LAST_LINES_S
    for outlet in (_output, _errors):
        outlet.flush(max(0.0, end_s - time.monotonic()))


def _count_dropped(lines: bytes) -> None:
    if _tell_dropped is not None:
        _tell_dropped(lines.count(b"\n"))


class QueuedLines(logging.Handler):
    """A log handler that writes to standard error without waiting."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # the message does not fit its arguments: our bug, not the caller's
            line = f"{record.levelname} {record.name}: {record.msg!r} {record.args!r}"
        try:
            _errors.put(line)
        except MemoryError:
            _count_dropped(b"\n")


# Of what others send, so that no part of a message passes for another line.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}


class TextLines(logging.Formatter):
    """Formats each record as one line, and what was raised below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROL)


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return _object(record.levelname, record.name, record.getMessage(), record.created, fields)


def set_up(log_format: LogFormat, level: str, access_log: bool) -> None:
    """Let every logger of the process write to standard error in this format."""
    # Started now: a process short of memory may not be able to start threads later.
    _errors.open()
    _output.open()
    handler = QueuedLines()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if access_log:
        logging.getLogger("stepdial.access").setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    atexit.register(flush)


def line(log_format: LogFormat, message: str, level: str = "INFO", **fields: Any) -> str:
    """A line outside the log, such as the list of models, in the format of the log."""
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
