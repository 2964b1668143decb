"""The answer of one replica on its way to the client: in one call if whole, else piece by piece.

Whoever stops waiting has the replica stop too. Knows Ray's calls; deliberately neither which
replica answers nor what becomes of a request whose replica is lost before it answers.
"""

import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayTaskError
from starlette.responses import Response, StreamingResponse

from deploy.ray.exchange import Head, Part, Piece, Whole
from deploy.ray.losses import CUT_OFF, BrokenOff, lost_stream

_log = logging.getLogger("ray.serve")


async def whole(call: Any) -> Whole:
    """What this call brings."""
    try:
        answer: Whole = await call
    except BaseException:
        call.cancel()
        raise
    return answer


def response_of(answer: Whole) -> Response:
    """As it goes to the client."""
    response = Response(answer.body, status_code=answer.head.status)
    response.raw_headers = [*answer.head.headers]
    return response


class Reply:
    """What one replica answers to a request that asks for a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._batches = aiter(stream)

    async def response(self, path: str) -> Response:
        """A stream that has begun, or a whole answer; whatever goes wrong before is raised."""
        try:
            head, *pieces = await self._some()
            assert isinstance(head, Head), "an answer without a head"
            while not pieces or not (head.streams or _over(pieces)):
                pieces += await self._some()
        except BaseException:
            self._stream.cancel()
            raise
        if not head.streams:
            return response_of(Whole(head, _joined(pieces)))
        streamed = StreamingResponse(self._rest(pieces, path), status_code=head.status)
        streamed.raw_headers = [*head.headers]
        return streamed

    async def _some(self) -> list[Part]:
        try:
            together: list[Part] = await anext(self._batches)
        except StopAsyncIteration:
            raise BrokenOff from None
        return together

    async def _rest(self, pieces: list[Part], path: str) -> AsyncIterator[bytes]:
        """The body from its first pieces on; always with one last event."""
        try:
            while True:
                yield _joined(pieces)
                if _over(pieces):
                    return
                pieces = await self._some()
        except CUT_OFF as error:
            _log.warning("a replica was lost while it streamed: %r", error)
            yield lost_stream(path)
        except RayTaskError:
            _log.exception("a bug of ours at %s", path)
            yield lost_stream(path)
        finally:
            self._stream.cancel()


def _over(pieces: list[Part]) -> bool:
    last = pieces[-1]
    return isinstance(last, Piece) and last.over


def _joined(pieces: list[Part]) -> bytes:
    return b"".join(piece.body for piece in pieces if isinstance(piece, Piece))
