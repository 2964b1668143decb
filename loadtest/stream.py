"""A text that arrives as server-sent events: read line by line, with the moment of each token.

In two dialects: that of /v1/generate, with an event `done` at the end, and that of OpenAI, with
the data `[DONE]`. It deliberately knows nothing of sockets; moments are of any monotonic clock.
"""

import json
from typing import Any

from loadtest.answers import AnswerError, Facts, openai_budget, parse, read_budget, read_usage
from loadtest.ask import Ask

_LAST_DATA = "[DONE]"  # of the dialect of OpenAI


class TokenStream:
    """Events of one generated text: tokens, then exactly one terminal event."""

    def __init__(self, ask: Ask, facts: Facts, openai: bool = False) -> None:
        self._ask = ask
        self._facts = facts
        self._openai = openai
        self._event = "message"
        self._data: list[str] = []
        self._ended = False
        self._told = False  # what was done for it

    def feed(self, line: bytes, at_s: float) -> None:
        """Take one line of the stream, with or without its line end."""
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if not text:
            self._dispatch(at_s)
            return
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._event = value
        elif field == "data":
            self._data.append(value)

    def finish(self) -> None:
        """The connection has ended: it must have said so first."""
        if not self._ended:
            raise AnswerError(f"the stream broke off after {self._facts.tokens} tokens")

    def _dispatch(self, at_s: float) -> None:
        event, data = self._event, "\n".join(self._data)
        self._event, self._data = "message", []
        if not data:  # a comment or a keep-alive
            return
        if self._ended:
            raise AnswerError("the stream went on after its terminal event")
        if self._openai:
            self._take_chunk(data, at_s)
        elif event == "message":
            self._take_token(parse(data), at_s)
        elif event == "done":
            self._ended = True
            payload = parse(data)
            read_budget(payload.get("budget"), self._ask, self._facts)
            tokens = self._facts.tokens
            read_usage(payload, self._facts)
            self._facts.tokens = tokens  # those that arrived
        elif event == "error":
            self._fail(parse(data))
        else:
            raise AnswerError(f"the stream holds an unknown event {event!r}")

    def _take_token(self, payload: dict[str, Any], at_s: float) -> None:
        facts, asked = self._facts, self._ask.steps
        if payload.get("index") != facts.tokens:
            raise AnswerError(f"token {facts.tokens} arrived as number {payload.get('index')}")
        if asked is not None and payload.get("steps") != asked:
            raise AnswerError(f"asked for {asked} steps, a token had {payload.get('steps')}")
        facts.token_moments_s.append(at_s)
        facts.tokens += 1

    def _take_chunk(self, data: str, at_s: float) -> None:
        if data == _LAST_DATA:
            self._ended = True
            if not self._told:
                read_budget(None, self._ask, self._facts)
            return
        payload = parse(data)
        if payload.get("error"):
            self._fail(payload)
        if budget := openai_budget(payload):
            self._told = True
            read_budget(budget, self._ask, self._facts)
        choices = payload.get("choices") or ()
        if not all(isinstance(choice, dict) for choice in choices):
            raise AnswerError("the stream holds choices that are no objects")
        for choice in choices:
            delta = choice.get("delta")
            said = delta if isinstance(delta, dict) else choice
            # The chunk that says who speaks, or why it ended, may carry no token.
            silent = "role" in said or choice.get("finish_reason") is not None
            if said.get("text") or said.get("content") or not silent:
                self._facts.token_moments_s.append(at_s)
                self._facts.tokens += 1
        if payload.get("usage"):
            read_usage(payload, self._facts)

    def _fail(self, payload: dict[str, Any]) -> None:
        self._ended = True
        error = payload.get("error", payload)
        told = isinstance(error, dict) and "code" in error and "message" in error
        said = f"{error['code']}: {error['message']}" if told else json.dumps(error)
        raise AnswerError(f"the stream ended with an error: {said}")
