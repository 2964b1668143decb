"""Answers to clients of HTTP/1.0, which has no chunks: the end of a connection ends its body.

uvicorn sends chunks to everybody. Knows uvicorn's state of a request; deliberately neither
applications nor what answers say.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """The application, for this request, whose pieces of an answer are sent as they are."""
    cycle.chunked_encoding = False
    # Such a client sends its body anyway, and takes what is told meanwhile for the answer.
    cycle.waiting_for_100_continue = False

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_undivided(message: Any) -> None:
            if message["type"] == "http.response.body":
                # As uvicorn counts down how much is still to come.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_undivided)

    return answer
