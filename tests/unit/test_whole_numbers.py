"""Integers of requests: 4.0 is one, as JSON has it; 4.5, true and "4" are none."""

import pytest
from pydantic import ValidationError

from serve.api.body import DEFAULT_MAX_TOKENS, GenerateRequest
from serve.api.oip import InputTensor, numbers_of_json
from serve.api.openai import CompletionRequest, check_prompts
from serve.errors import InvalidField


def test_an_integer_may_be_written_with_a_point() -> None:
    asked = GenerateRequest.model_validate_json('{"prompt":"a","steps":4.0,"max_tokens":1e1}')
    assert (asked.steps, asked.max_tokens) == (4, 10) and type(asked.steps) is int
    assert CompletionRequest.model_validate_json('{"prompt":"a","n":2.0}').answers == 2
    assert check_prompts([3.0, 4])[0].value == (3, 4)
    tensor = '{"name":"text","datatype":"BYTES","shape":[2.0]}'
    assert InputTensor.model_validate_json(tensor).shape == [2]
    assert numbers_of_json([0, 255.0], "UINT8", [2], "here").tolist() == [0, 255]


@pytest.mark.parametrize("steps", ["4.5", "true", '"4"', "0.0", "1e400", "3e9", "NaN", "[4]"])
def test_whatever_else_is_refused(steps: str) -> None:
    with pytest.raises(ValidationError):
        GenerateRequest.model_validate_json(f'{{"prompt":"a","steps":{steps}}}')


def test_what_is_no_token_or_byte_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"prompt\[1\] must be a token"):
        check_prompts([3, 4.5])
    with pytest.raises(InvalidField, match="send integers from 0 to 255"):
        numbers_of_json([0, 0.5], "UINT8", [2], "here")


def test_an_answer_is_no_longer_than_the_server_writes_unless_that_is_asked() -> None:
    asked = GenerateRequest.model_validate({"prompt": "a"})
    assert asked.limit(64) == 64 and asked.limit(10**6) == DEFAULT_MAX_TOKENS
    asked = GenerateRequest.model_validate({"prompt": "a", "max_tokens": 100})
    assert asked.limit(64) == 100
