"""Whatever a body of 1 MiB holds, refusing it costs the event loop little and the process no more
than a few megabytes.

Bodies are made of hostile parts and sent to a real server, to every route that takes one. Processor
time is that of the thread of the event loop, memory the peak of the process, both as the system
counts them. STEPDIAL_HOSTILE_EXAMPLES asks for more examples than CI has.
"""

import base64
import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from serve.server import GIVE_BACK_S
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    translate_bundle,
)
from tests.server_process import ServerProcess, server_process

pytestmark = pytest.mark.long

EXAMPLES = int(os.environ.get("STEPDIAL_HOSTILE_EXAMPLES", "500"))
MOST_BYTES = 2**20
LOOP_S = 0.05
GROWTH_BYTES = 32 * 2**20
# What else runs on the machine is counted too, now and then: what a body costs, it costs again.
_TRIES = 3

ADMIN_KEY = "an-admin-key-of-the-tests"
MODELS = ("tiny-classify", "tiny-generate", "tiny-image", "tiny-points", "tiny-translate")
PATHS = (
    "/v1/classify",
    "/v1/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    *(f"/v2/models/{model}/infer" for model in MODELS),
    "/v2/repository/index",
    "/admin/models",
)
TENSOR = '{"name":"text","datatype":"BYTES","shape":[1],"data":["x"]}'
# Where something hostile goes in a request that is sound but for that.
FRAMES = (
    "@",
    '{"input":@}',
    '{"input":[@,@]}',
    '{"input":{"image":@}}',
    '{"input":{"points":@}}',
    '{"input":[{"image":@},{"image":@}]}',
    '{"input":"x","steps":@}',
    '{"input":"x","top_k":@,"model":@}',
    '{"prompt":@}',
    '{"prompt":[@,@]}',
    '{"prompt":"x","stop":@}',
    '{"prompt":"x","logit_bias":@}',
    '{"prompt":"x","max_tokens":@,"seed":@}',
    '{"prompt":"x","best_of":4,"suffix":@}',
    '{"messages":@}',
    '{"messages":[@]}',
    '{"messages":[{"role":"user","content":@}]}',
    '{"messages":[{"role":@,"content":"x","name":@}]}',
    '{"messages":[{"role":"user","content":"x"}],"metadata":@}',
    '{"messages":[{"role":"user","content":"x"}],"tools":@,"response_format":@}',
    '{"messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":@}',
    '{"inputs":@}',
    '{"inputs":[@]}',
    f'{{"inputs":[{TENSOR}],"outputs":@}}',
    f'{{"inputs":[{TENSOR}],"parameters":@}}',
    TENSOR.join(('{"inputs":[', '],"id":@}')),
    '{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":@}]}',
    '{"inputs":[{"name":"image","datatype":"UINT8","shape":[1,1,6,5],"data":@}]}',
    '{"inputs":[{"name":"points","datatype":"FP32","shape":[1,3,3],"data":@}]}',
    '{"inputs":[{"name":"text","datatype":"BYTES","shape":@,"data":["x"]}]}',
    '{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":@}]}',
    '{"inputs":[{"name":@,"datatype":@,"shape":[1],"data":["x"]}]}',
    '{"ready":@}',
    '{"bundle":@}',
)
ITEMS = (
    *("{}", "[]", "[[]]", "0", "-1", "1.5", "1e5", "1e999", "NaN", "null", "true", '""', '"a"'),
    *("[0]", "[0,0,0]", "[[0]]", "[0.5,0.5,0.5]", '{"":0}', '{"a":{"b":[]}}', '"\\u00e9"', '"{"'),
    *('{"image":[[0]]}', '{"points":[[0,0,0]]}', '{"type":"text","text":""}', TENSOR),
    *('{"role":"user","content":"x"}', '{"role":"x"}', '{"name":"label"}', '{"name":"x","x":1}'),
    *("9" * 300, "0." + "1" * 300, "9" * 4000),
)
LETTERS = ("a", " ", "\\n", "\\\\", '\\"', "{", "[{", ",", "é", "\\u00e9", "\\ud83d\\ude00", "AAAA")
KEYS = ("k{}", "steps{}", "{}", "input", "prompt", "", "a" * 200 + "{}")


def many(before: str, item: str, after: str, size: int) -> str:
    """As many of these, separated by commas, as fit."""
    count = max(1, (size - len(before) - len(after)) // (len(item.encode()) + 1))
    return before + ",".join([item] * count) + after


def members(key: str, value: str, size: int) -> str:
    count = max(1, size // (len(key) + len(value) + 10))
    start, number, end = f'"{key}":'.partition("{}")
    if not number:
        return "{" + ",".join([start + value] * count) + "}"
    return "{" + ",".join([f"{start}{i}{end}{value}" for i in range(count)]) + "}"


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "0" + closing * depth


sizes = st.sampled_from([50, 5_000, 40_000, 300_000, MOST_BYTES])
depths = st.sampled_from([3, 90, 190, 5_000])


@st.composite
def values(draw: st.DrawFn) -> str:
    size, item = draw(sizes), draw(st.sampled_from(ITEMS))
    match draw(st.integers(0, 6)):
        case 0:
            return many("[", item, "]", size)
        case 1:
            return members(draw(st.sampled_from(KEYS)), item, size)
        case 2:
            brackets = draw(st.sampled_from([("[", "]"), ('{"":', "}"), ('[{"a":', "}]")]))
            return many("[", nested(*brackets, draw(depths)), "]", size)
        case 3:
            letter = draw(st.sampled_from(LETTERS))
            return f'"{letter * (size // len(letter.encode()))}"'
        case 4:
            return draw(st.sampled_from("19-")) + "0123456789" * (size // 10)
        case 5:
            return many("[", many("[", item, "]", draw(st.sampled_from([10, 1_000]))), "]", size)
        case _:
            return item


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """At most 1 MiB, mostly JSON."""
    value = draw(values())
    text = draw(st.sampled_from(FRAMES)).replace("@", value, 1).replace("@", draw(values()))
    if draw(st.booleans()) and text.endswith("}"):
        more = members(draw(st.sampled_from(KEYS)), draw(st.sampled_from(ITEMS)), draw(sizes))
        text = f"{text[:-1]},{more[1:]}"
    if draw(st.integers(0, 9)) == 0:
        text = many(text[:-1], '"input":"x"', "}", draw(sizes))  # one key again and again
    body = text.encode()[:MOST_BYTES]
    if draw(st.integers(0, 9)) == 0:
        body = body[: draw(st.integers(0, len(body)))]
    return body


class Measured:
    """A server, and what it has spent."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._process = Path(f"/proc/{server.process.pid}")
        self._client = httpx.Client(
            base_url=server.url,
            timeout=60,
            headers={"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"},
        )
        large = many('{"input":[', "[0]", "]}", MOST_BYTES).encode()
        for path in PATHS:  # whatever is made at the first request, and kept
            for body in (b"{", b'{"input":"x","prompt":"x"}', large):
                self._client.post(path, content=body)
        self._began_bytes = self._memory("VmRSS")

    @property
    def kept_bytes(self) -> int:
        """By how much memory has grown since the beginning."""
        return self._memory("VmRSS") - self._began_bytes

    def post(self, path: str, body: bytes) -> tuple[httpx.Response, float, int]:
        """The answer, the processor time of the event loop, and by how much memory had grown."""
        (self._process / "clear_refs").write_text("5")  # the peak is that from now on
        before_s, before_bytes = self._loop_s(), self._memory("VmRSS")
        response = self._client.post(path, content=body)
        spent_s = self._loop_s() - before_s
        return response, spent_s, self._memory("VmHWM") - before_bytes

    def close(self) -> None:
        self._client.close()

    def _loop_s(self) -> float:
        """Of the first thread of the process, whose event loop it is."""
        own = self._process / "task" / self._process.name
        return int((own / "schedstat").read_text().split()[0]) / 1e9

    def _memory(self, kind: str) -> int:
        return self._server.memory_kib(kind) * 1024


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    folders = [
        bundle().folder
        for bundle in (
            *(classify_bundle, generate_bundle, image_bundle, points_bundle, translate_bundle),
        )
    ]
    own = {"STEPDIAL_ADMIN_KEY": ADMIN_KEY}
    with server_process(folders, environment=own, cold=True) as running:
        found = Measured(running)
        yield found
        found.close()
        assert 'code="500"' not in httpx.get(f"{running.url}/metrics").text
        end_s = time.monotonic() + GIVE_BACK_S + 1
        while found.kept_bytes > GROWTH_BYTES and time.monotonic() < end_s:
            time.sleep(0.1)
        print(f"{found.kept_bytes / 2**20:.1f} MiB are kept after {EXAMPLES} examples")
        assert found.kept_bytes <= GROWTH_BYTES, f"{found.kept_bytes / 2**20:.0f} MiB are kept"


def test_every_route_that_takes_a_body_is_tried(measured: Measured) -> None:
    document = measured._client.get("/openapi.json").json()["paths"]
    taking = {
        path for path, methods in document.items() if "requestBody" in methods.get("post", {})
    }
    patterns = [re.compile(re.sub("{[^}]*}", "[^/]+", path)) for path in taking]
    versions = [path for path in taking if "/versions/" in path]  # the same as without
    untried = [one.pattern for one in patterns if not any(one.fullmatch(path) for path in PATHS)]
    assert len(untried) == len(versions)


def in_a_list(field: str, member: str) -> bytes:
    """Many members of an object in a list, or of one in it."""
    item = members("{}", "1e5", MOST_BYTES - 100)
    if member:
        item = f'{{"{member}":{item}}}'
    return f'{{"{field}":[{item}]}}'.encode()


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of an example that fails
@settings(
    max_examples=EXAMPLES,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(path=st.sampled_from(PATHS), body=bodies())
@example("/v2/models/tiny-classify/infer", many('{"inputs":[', "{}", "]}", MOST_BYTES).encode())
@example("/v2/models/tiny-classify/infer", many('{"outputs":[', "{}", "]}", MOST_BYTES).encode())
@example("/v1/generate", members("k{}", "1", MOST_BYTES).encode()[: MOST_BYTES - 1] + b"}")
@example("/v2/models/tiny-translate/infer", in_a_list("inputs", ""))  # 68 MiB of errors once
@example("/v2/models/tiny-classify/infer", in_a_list("inputs", "parameters"))
@example("/v1/chat/completions", in_a_list("messages", ""))
@example("/v1/generate", b'{"' + b"k" * 1_000_000 + b'": 1}')
@example("/v1/chat/completions", b"[" * MOST_BYTES)
@example("/v1/classify", f'{{"input":["{"é" * 500_000}"]}}'.encode())  # 39 ms once
def test_refusing_any_body_is_cheap(measured: Measured, path: str, body: bytes) -> None:
    for _ in range(_TRIES):
        response, spent_s, grown = measured.post(path, body)
        assert response.status_code in (200, 400, 403, 404, 422, 429), response.text
        assert len(response.content) < 16_384 or response.status_code == 200
        if spent_s <= LOOP_S and grown <= GROWTH_BYTES:
            return
    described = f"{len(body)} bytes, {json.dumps(body[:80].decode('utf-8', 'replace'))}"
    assert spent_s <= LOOP_S, f"{spent_s * 1000:.0f} ms of the event loop for {described}"
    assert grown <= GROWTH_BYTES, f"{grown / 2**20:.0f} MiB for {described}"


def picture(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    encoded = base64.b64encode(stream.getvalue()).decode()
    return json.dumps({"model": "tiny-image", "input": {"image": encoded}}).encode()


SIDE = 2048
DEEP = np.zeros((SIDE * 2, SIDE * 2), np.uint16)
# Of every kind the largest that is decoded, and one that is a little larger.
PICTURES: dict[str, tuple[Image.Image, str, dict[str, Any], int]] = {
    "grey": (Image.new("L", (2 * SIDE, 2 * SIDE)), "PNG", {}, 200),
    "16 bits": (Image.fromarray(DEEP[:2896, :2896]), "PNG", {}, 200),
    "more of 16 bits": (Image.fromarray(DEEP), "PNG", {}, 422),  # 444 MB once
    "a palette": (Image.new("P", (2 * SIDE, 2 * SIDE)), "PNG", {"transparency": 0}, 200),
    "two colours": (Image.new("1", (2 * SIDE, 2 * SIDE)), "PNG", {}, 200),
    "colour": (Image.new("RGB", (SIDE, SIDE)), "PNG", {}, 200),
    "more of colour": (Image.new("RGB", (SIDE, SIDE + 1)), "PNG", {}, 422),
    "alpha": (Image.new("RGBA", (SIDE, SIDE)), "PNG", {}, 200),
    "JPEG": (Image.new("RGB", (2 * SIDE, 2 * SIDE)), "JPEG", {}, 200),
    "progressive": (Image.new("RGB", (1640, 1640)), "JPEG", {"progressive": True}, 200),
    "more progressive": (Image.new("RGB", (1700, 1700)), "JPEG", {"progressive": True}, 422),
    "WebP": (Image.new("RGB", (1024, 1024)), "WEBP", {}, 200),
    "more of WebP": (Image.new("RGB", (1024, 1025)), "WEBP", {}, 422),
    "GIF": (Image.new("P", (2 * SIDE, 2 * SIDE)), "GIF", {}, 200),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_picture_takes_much_memory(measured: Measured, name: str) -> None:
    image, kind, options, status = PICTURES[name]
    body = picture(image, kind, **options)
    assert len(body) <= MOST_BYTES
    response, spent_s, grown = measured.post("/v1/classify", body)
    assert response.status_code == status, response.text
    assert spent_s <= LOOP_S and grown <= GROWTH_BYTES, (spent_s, grown / 2**20)
