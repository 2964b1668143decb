"""Bodies that are still arriving: together they have a limit, as those that wait have."""

import pytest

from serve.api import body
from serve.api.body import Reader
from serve.engine.job import Limits
from serve.errors import QueueFull
from serve.settings import Settings
from tests.stepped import SteppedEngine


def test_bodies_that_arrive_together_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "UNREAD_BYTES", 1000)
    reader = Reader(Settings(), SteppedEngine(Limits()))
    with reader.receiving() as first:
        first(600)
        with reader.receiving() as second:
            second(400)
            with pytest.raises(QueueFull, match="bodies that are arriving fill the"):
                second(1)
        with reader.receiving() as third:  # what was refused is gone
            third(400)
    with reader.receiving() as alone:  # one body alone has the limit of a body
        alone(5000)
    assert reader._arriving_bytes == 0
    reader.close()
