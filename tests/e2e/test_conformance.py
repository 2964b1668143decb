"""The server against its own OpenAPI document, in a short run of schemathesis.

The long run is benchmarks/conformance.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.conformance import (
    accepted_of,
    as_it_is,
    document_of,
    failures_of,
    serving,
    tiny_bundles,
    within_models,
)
from benchmarks.server import Server
from serve.bundle import Bundle

pytestmark = pytest.mark.long

EXAMPLES = 3


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder: Path = tmp_path_factory.mktemp("models")
    return tiny_bundles(folder)


@pytest.fixture(scope="module")
def server(bundles: list[Bundle]) -> Iterator[Server]:
    with serving(bundles) as running:
        yield running


def test_the_server_keeps_to_its_document(server: Server) -> None:
    document = document_of(server)
    # The routes with a version are those without, once more.
    found = as_it_is(server, document, EXAMPLES, "--exclude-path-regex", "/versions/")
    assert failures_of(found.report) == ()
    assert not [status for status in found.statuses if status >= "500"]
    assert {"200", "400", "403", "404", "405", "422"} <= found.statuses.keys()
    operations = sum(
        len(methods) for path, methods in document["paths"].items() if "/versions/" not in path
    )
    assert found.report["operations"]["tested"] == operations >= 20


def test_what_the_models_can_do_is_answered(server: Server, bundles: list[Bundle]) -> None:
    found = within_models(server, document_of(server), bundles, EXAMPLES, "--phases", "fuzzing")
    assert failures_of(found.report) == ()
    posts = [name for name in found.report["valid_rates"] if name.startswith("POST")]
    assert len(posts) == 5 + 2 * len(bundles)
    assert all(accepted_of(found.report, [post]) for post in posts)
