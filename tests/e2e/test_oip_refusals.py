"""Open Inference Protocol: what is wrong with a request is refused in words, never with a 5xx."""

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from tests.examples import examples
from tests.faults.raw_http import exchange, head
from tests.faults.raw_http import status as status_of
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
)
from tests.oip_client import refusal, texts_in
from tests.server_process import ServerProcess, server_process

LENGTH = "Inference-Header-Content-Length"
URL = "/v2/models/tiny-classify/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    bundles = [classify_bundle(), generate_bundle(), image_bundle(), points_bundle()]
    flags = ("--max-inputs", "8", "--max-tokens", "128", "--max-body-bytes", "65536")
    limits = (*flags, "--body-timeout-s", "0.5")
    with server_process([bundle.folder for bundle in bundles], *limits) as running:
        yield running
        metrics = httpx.get(f"{running.url}/metrics").text
        assert 'code="500"' not in metrics and "stepdial_in_flight 0.0" in metrics


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        yield made


@pytest.mark.parametrize(
    ("model", "parameters", "says"),
    [
        ("tiny-classify", {"stepz": 1}, "unknown parameter 'stepz': did you mean steps?"),
        ("tiny-classify", {"max_tokens": 1}, "unknown parameter 'max_tokens'"),
        ("tiny-classify", {"steps": 3}, "does not offer 3 steps; it has 1, 2, 4"),
        ("tiny-classify", {"steps": "2"}, "steps must be an integer"),
        ("tiny-classify", {"steps": None}, "steps is null: leave it out"),
        ("tiny-classify", {"max_disagreement": 0.1}, "cannot promise how often"),
        ("tiny-classify", {"deadline_ms": 1e-6}, "give it at least"),
        ("tiny-generate", {"num_beams": 2}, "unknown parameter 'num_beams'"),
        ("tiny-generate", {"max_tokens": 129}, "writes at most 128"),
        ("tiny-generate", {"stop": ["", "x"]}, "stop[0] is empty"),
    ],
)
def test_impossible_parameters_are_refused_saying_why(
    client: Any, model: str, parameters: dict[str, Any], says: str
) -> None:
    status, message = refusal(lambda: client.infer(model, [texts_in(["x"])], parameters=parameters))
    assert status == "400" and says in message


def test_what_is_not_there_is_refused_and_never_ignored(client: Any) -> None:
    tensor = texts_in(["x"])
    shared = InferInput("text", [1], "BYTES").set_shared_memory("region", 8)
    calls: list[tuple[str, Callable[[], Any], str]] = [
        ("404", lambda: client.infer("nobody", [tensor]), "no model named 'nobody'"),
        ("404", lambda: client.infer("tiny-classify", [tensor], "2"), "has no version '2'"),
        ("404", lambda: client.get_model_config("tiny-classify"), "there is nothing at"),
        ("404", lambda: client.get_inference_statistics("tiny-classify"), "there is nothing at"),
        (
            "400",
            lambda: client.infer("tiny-classify", [tensor], timeout=9),
            "did you mean deadline_ms?",
        ),
        (
            "400",
            lambda: client.infer("tiny-classify", [shared]),
            "shared_memory_byte_size is not known here",
        ),
    ]
    for output, says in (
        (InferRequestedOutput("label", class_count=2), "classification is not supported"),
        (InferRequestedOutput("lable"), "'lable', but tiny-classify gives label, score, steps"),
    ):
        asked = partial(client.infer, "tiny-classify", [tensor], outputs=[output])
        calls.append(("400", asked, says))
    for status, call, says in calls:
        found, message = refusal(call)
        assert (found, says in message) == (status, True), message


def test_too_many_rows_are_refused_as_everywhere(client: Any) -> None:
    status, message = refusal(lambda: client.infer("tiny-classify", [texts_in(["x"] * 9)]))
    assert status == "400" and "takes at most 8 at once" in message


def test_a_character_outside_the_vocabulary_names_its_row(client: Any) -> None:
    status, message = refusal(lambda: client.infer("tiny-generate", [texts_in(["ok", "né"])]))
    assert status == "400" and message.startswith("text[1]")


def tensor(**changes: Any) -> dict[str, Any]:
    """A good input of the text classifier, but for the changes; None leaves a field out."""
    good = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def said(response: httpx.Response, says: str) -> None:
    body = response.json()
    assert list(body) == ["error"] and says in body["error"], body
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty"),
        (b"{", "is not JSON that can be read"),
        (b"[]", "the body must be a JSON object"),
        (b'{"inputs": "\\ud800"}', "both halves"),
        (b"[" * 30_000, "is not JSON that can be read"),
        ({}, "inputs is missing"),
        ({"inputs": []}, "inputs is an empty list"),
        ({"inputs": None}, "inputs must be a list"),
        ({"id": 7, "inputs": [tensor()]}, "id must be a string"),
        ({"inputs": [tensor()], "stepz": 1}, "unknown field stepz"),
        ({"inputs": [tensor()], "output": []}, "unknown field output: did you mean outputs?"),
        ({"inputs": [tensor()], "steps": 2}, "unknown field steps: send it in parameters"),
        ({"inputs": [tensor(dataa=[])]}, "unknown field inputs[0].dataa: did you mean data?"),
        ({"inputs": [tensor(), tensor()]}, "inputs has 2 tensors named 'text': send one"),
        ({"inputs": [tensor(name="txet")]}, "'txet', but tiny-classify takes 'text' only"),
        ({"inputs": [tensor(datatype="FP32")]}, "is 'FP32', but text of tiny-classify is BYTES"),
        ({"inputs": [tensor(data=None)]}, "inputs[0].data is missing"),
        ({"inputs": [tensor(data=[1])]}, "inputs[0].data[0] is no string"),
        ({"inputs": [tensor(data=[""])]}, "text[0] is empty"),
        ({"inputs": [tensor(shape=[2])]}, "does not have the shape [2]"),
        ({"inputs": [tensor(shape=[0], data=[])]}, "where -1 is any size from 1"),
        ({"inputs": [tensor(shape=[-1])]}, "where -1 is any size from 1"),
        ({"inputs": [tensor(shape=[1, 1])]}, "inputs[0].shape is [1, 1]"),
        ({"inputs": [tensor(shape=[])]}, "inputs[0].shape is []"),
        ({"inputs": [tensor(shape=[1.5])]}, "inputs[0].shape[0] must be an integer"),
        ({"inputs": [tensor(shape=[True])]}, "inputs[0].shape[0] must be an integer"),
        ({"inputs": [tensor(shape=[2**40])]}, "takes at most 8 at once"),
        ({"inputs": [tensor(shape=[10**300])]}, "takes at most 8 at once"),
        ({"inputs": [tensor(parameters={"x": 1})]}, "inputs[0].parameters.x is not known"),
        ({"inputs": [tensor()], "outputs": [{"name": "steps"}] * 2}, "a second time"),
        (
            {"inputs": [tensor()], "outputs": [{"name": "steps", "parameters": {"x": 1}}]},
            "outputs[0].parameters.x is not known",
        ),
        (
            {
                "inputs": [tensor()],
                "outputs": [{"name": "steps", "parameters": {"binary_data": 1}}],
            },
            "outputs[0].parameters.binary_data must be true or false",
        ),
        (
            {"inputs": [tensor()], "parameters": {"binary_data_output": "yes"}},
            "parameters.binary_data_output must be true or false",
        ),
        (
            {"inputs": [tensor(data=None, parameters={"binary_data_size": 5})]},
            "the header Inference-Header-Content-Length is missing",
        ),
    ],
)
def test_what_is_wrong_with_json_is_said(raw: httpx.Client, body: Any, says: str) -> None:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = raw.post(URL, content=sent)
    assert response.status_code == 400
    said(response, says)


def test_a_parameter_in_the_url_is_told_where_it_belongs(client: Any) -> None:
    tensors = [texts_in(["x"])]
    asked = partial(client.infer, "tiny-classify", tensors)
    status, message = refusal(lambda: asked(query_params={"steps": 2}))
    assert status == "400"
    assert message == "steps in the URL is not read: send it in parameters of the JSON body"
    asked(query_params={"api-version": 7})  # a gateway's


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("image", {"shape": [1, 1, 5, 6]}, "is [-1, 1, 6, 5], where -1 is any size from 1"),
        ("image", {"datatype": "INT32"}, "is 'INT32', but image of tiny-image is FP32 or UINT8"),
        ("image", {"data": [2.0] * 30}, "has the value 2: send FP32 from 0 to 1, or UINT8"),
        ("image", {"data": [1e999] * 30}, "not finite"),
        ("image", {"data": [0.5] * 29}, "does not have the shape"),
        ("points", {"shape": [1, 33, 3], "data": [0.5] * 99}, "takes at most 32: leave some out"),
        ("points", {"shape": [1, 0, 3], "data": []}, "where -1 is any size from 1"),
        ("points", {"shape": [1, 2**62, 3], "data": []}, "takes at most 32"),
    ],
)
def test_tensors_of_numbers_are_held_to_what_the_model_takes(
    raw: httpx.Client, model: str, changes: dict[str, Any], says: str
) -> None:
    shape = [1, 1, 6, 5] if model == "image" else [1, 2, 3]
    sent = tensor(name=model, datatype="FP32", shape=shape, data=[0.5] * 30) | changes
    text = json.dumps({"inputs": [sent]}).replace("Infinity", "1e999")
    response = raw.post(f"/v2/models/tiny-{model}/infer", content=text)
    assert response.status_code == 400
    said(response, says)


def binary(
    raw: bytes, size: int | str | None = None, length: str | None = None, **changes: Any
) -> tuple[dict[str, str], bytes]:
    """A request whose one tensor is bytes, with the sizes that it should have, or others."""
    sizes = {"binary_data_size": len(raw) if size is None else size}
    text = json.dumps(
        {"inputs": [tensor(**{"data": None, "parameters": sizes, **changes})]}
    ).encode()
    return {LENGTH: str(len(text)) if length is None else length}, text + raw


ONE = struct.pack("<I", 1) + b"x"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (binary(b""), "0 whole elements in its 0 bytes"),
        (binary(ONE[:-1]), "is said to have 1 bytes, but 0 are left"),
        (binary(ONE + b"y"), "has 1 bytes behind its 1 elements"),
        (binary(ONE, shape=[2]), "has 1 whole elements"),
        (binary(struct.pack("<I", 2**32 - 1) + b"x"), "is said to have 4294967295 bytes"),
        (binary(struct.pack("<I", 2) + b"\xff\xfe"), "no UTF-8 at byte 0"),
        (binary(ONE, size=4), "1 bytes behind the JSON belong to no input"),
        (binary(ONE, size=6), "is 6, but 5 bytes are left behind the JSON"),
        (binary(ONE, size=-5), "must be a number of bytes"),
        (binary(ONE, size=2**63), "but 5 bytes are left"),
        (binary(ONE, size="5"), "must be a number of bytes"),
        (binary(ONE, data=["x"]), "has both data and binary_data_size"),
        (binary(ONE, length=""), "must be one number of bytes"),
        (binary(ONE, length="-1"), "must be one number of bytes"),
        (binary(ONE, length="1e2"), "must be one number of bytes"),
        (binary(ONE, length="9" * 5000), "must be one number of bytes"),
        (binary(ONE, length=str(2**63)), "but the body has"),
        (binary(ONE, length="0"), "the body is empty"),
        (binary(ONE, length="7"), "is not JSON that can be read"),
        (binary(ONE, shape=[-1]), "where -1 is any size"),
        (binary(ONE, datatype="FP32"), "but text of tiny-classify is BYTES"),
        (binary(bytes(70_000)), "the body is larger than 65536 bytes"),
    ],
)
def test_bytes_that_do_not_fit_exactly_are_refused(
    raw: httpx.Client, sent: tuple[dict[str, str], bytes], says: str
) -> None:
    headers, body = sent
    response = raw.post(URL, content=body, headers=headers)
    assert response.status_code == (413 if "larger" in says else 400)
    said(response, says)


def test_inputs_that_share_their_bytes_are_refused(raw: httpx.Client) -> None:
    sizes = {"binary_data_size": len(ONE)}
    both = [tensor(data=None, parameters=sizes)] * 2
    text = json.dumps({"inputs": both}).encode()
    response = raw.post(URL, content=text + ONE, headers={LENGTH: str(len(text))})
    assert response.status_code == 400
    said(response, "inputs[1].parameters.binary_data_size is 5, but 0 bytes are left")


def test_a_body_that_stops_coming_times_out(server: ServerProcess) -> None:
    headers, body = binary(ONE)
    begun = head(len(body), f"{LENGTH}: {headers[LENGTH]}", path=URL)
    received = exchange(server, begun, body[:-2])
    assert status_of(received) == 408 and b'{"error": ' in received


@settings(max_examples=examples(150))
@given(st.data())
def test_no_altered_byte_of_a_binary_request_breaks_the_server(
    raw: httpx.Client, data: st.DataObject
) -> None:
    headers, body = binary(ONE + struct.pack("<I", 2) + b"yz", shape=[2])
    at = data.draw(st.integers(0, len(body) - 1))
    altered = body[:at] + data.draw(st.binary(max_size=6)) + body[at + 1 :]
    response = raw.post(URL, content=altered, headers=headers)
    assert response.status_code in (200, 400)


def test_a_method_that_a_route_does_not_take(raw: httpx.Client) -> None:
    response = raw.get(URL)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    said(response, "send POST")
