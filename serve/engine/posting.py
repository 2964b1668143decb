"""Carries events from the engine's thread to where they are read.

Knows a function that takes them there, such as that of an event loop; deliberately no loop itself.
"""

import logging
from collections.abc import Callable
from typing import Any

from serve.engine.work import Deliveries

Post = Callable[..., Any]

_log = logging.getLogger("stepdial")


class Posting:
    """Delivers at once, on the thread that sends, until it is told another way."""

    def __init__(self) -> None:
        self._post: Post = _deliver_here

    def through(self, post: Post) -> None:
        """From now on `post(function, *arguments)` takes events to where they are read."""
        self._post = post

    def send(self, deliveries: Deliveries) -> None:
        if not deliveries:
            return
        try:
            self._post(_deliver_all, deliveries)
        except RuntimeError:
            # The event loop has closed: whoever was waiting has gone with it.
            _log.warning("%d events came after the server had closed", len(deliveries))


def _deliver_all(deliveries: Deliveries) -> None:
    for deliver, event in deliveries:
        deliver(event)


def _deliver_here(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)
