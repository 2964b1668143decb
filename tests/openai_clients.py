"""What tests of the API in OpenAI's shape share: clients, and streams as their bytes.

Knows the official client; deliberately nothing of what is answered.
"""

import json
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from tests.server_process import ServerProcess


def sync_client(server: ServerProcess, max_retries: int = 0) -> OpenAI:
    """The official client, which by default tries once."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=max_retries)


def async_client(server: ServerProcess) -> AsyncOpenAI:
    """The official client for an event loop."""
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def generated(raw: httpx.Client, **body: Any) -> dict[str, Any]:
    """What the server's own route answers."""
    response = raw.post("/v1/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def read_chunks(response: httpx.Response) -> tuple[list[dict[str, Any]], str]:
    """The chunks of a whole stream, and what ended it: `done`, or `error` in the last chunk."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_chunks(response.text)


def parse_chunks(text: str) -> tuple[list[dict[str, Any]], str]:
    """The same of its bytes; exactly one terminal event, at its end."""
    assert text.endswith("\n\n"), "the last event is not complete"
    events = text.split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    data = [event.removeprefix("data: ") for event in events]
    if data[-1] == "[DONE]":
        chunks = [json.loads(one) for one in data[:-1]]
        assert not any("error" in chunk for chunk in chunks)
        return chunks, "done"
    chunks = [json.loads(one) for one in data]
    assert ["error" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return chunks, "error"
