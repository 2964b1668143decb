"""The log of the real process as JSON: one object a line, with the id of the request."""

import base64
import io
import json
import re
import struct
from typing import Any

import httpx
from PIL import Image

from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, image_bundle
from tests.server_process import run_to_end, server_process

FLAGS = ("--log-format", "json", "--access-log", "--log-level", "info")


def lines_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_every_line_is_an_object_and_requests_have_their_ids() -> None:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders, *FLAGS) as server:
        client = httpx.Client(base_url=server.url, timeout=30)
        asked = {"prompt": "To be", "max_tokens": 5, "steps": 2, "stream": True}
        client.post("/v1/generate", json=asked, headers={"x-request-id": "mine"})
        client.post("/v1/classify", json={"input": "good", "effort": "low"})
        client.post("/v1/classify", content=b"{", headers={"x-request-id": "broken"})
        client.get("/x%0a{}%22")
        client.close()
        server.terminate()
        assert server.wait() == 0
        lines = lines_of(server.banner + server.rest_of_output())
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    (said,) = (line for line in lines if "models" in line)
    assert said["models"] == ["tiny-classify", "tiny-generate"] and said["url"] == server.url
    assert "curl" in said["message"]
    streamed, classified, broken, odd = [
        line for line in lines if line["logger"] == "stepdial.access"
    ]
    of_model = {"model": "tiny-generate", "steps": 2, "reason": "exact"}
    of_request = {"method": "POST", "path": "/v1/generate", "status": 200, "id": "mine"}
    assert (of_model | of_request).items() <= streamed.items() and streamed["ms"] > 0
    assert classified["reason"] == "effort" and len(classified["id"]) == 16
    assert (broken["status"], broken["id"]) == (400, "broken") and "model" not in broken
    assert odd["path"].startswith("/x%0a") and odd["status"] == 404
    assert {line["logger"] for line in lines} >= {"stepdial", "stepdial.access", "uvicorn.error"}


def test_what_is_said_while_models_load_is_in_the_same_form() -> None:
    asked = ("--device", "cuda", "--allow-cpu-fallback")
    with server_process([classify_bundle().folder], *FLAGS, *asked) as server:
        server.terminate()
        assert server.wait() == 0
        lines = lines_of(server.banner + server.rest_of_output())
    warned = [line for line in lines if line["level"] == "warning"]
    assert any("cuda" in line["message"] for line in warned)


def test_a_picture_with_odd_tags_writes_no_lines() -> None:
    tags = b"".join(struct.pack("<HHII", tag, 1, 2**31, 0) for tag in range(100))
    exif = b"II*\0" + struct.pack("<IH", 8, 100) + tags + bytes(4)
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "PNG", exif=exif)
    asked = {"input": {"image": base64.b64encode(file.getvalue()).decode()}}
    with server_process(
        [image_bundle().folder], environment={"PYTHONWARNINGS": "default"}
    ) as server:
        assert httpx.post(f"{server.url}/v1/classify", json=asked).status_code == 200
        server.terminate()
        assert server.wait() == 0
        assert "PIL" not in server.rest_of_output()


def test_what_cannot_be_served_is_said_in_the_same_form() -> None:
    ended = run_to_end(["nowhere", "--port", "0", *FLAGS])
    (line,) = lines_of(ended.stderr)
    assert (ended.returncode, line["level"]) == (2, "critical")
    assert line["message"].startswith("stepdial serve: nowhere: is no folder")
