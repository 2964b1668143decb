"""The protocol's own REST description against the real process, in a short run of schemathesis."""

import os
from collections.abc import Iterator

import pytest

from benchmarks.oip_conformance import (
    UNAVOIDABLE,
    VARIABLE,
    VARIANTS,
    Variant,
    conform,
    read_description,
)
from tests.fixtures.tiny_folders import classify_bundle
from tests.server_process import ServerProcess, server_process

pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE),
    reason=f"LEFT OUT: {VARIABLE} names no file; it is open_inference_rest.yaml of the project "
    "kserve/open-inference-protocol",
)
_EXAMPLES = 5
_LARGEST = {variant.title: 0 for variant in VARIANTS} | {VARIANTS[0].title: UNAVOIDABLE}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process([classify_bundle().folder]) as running:
        yield running


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.title for variant in VARIANTS])
def test_the_description_is_kept_to(server: ServerProcess, variant: Variant) -> None:
    description = read_description(os.environ[VARIABLE])
    found = conform(variant, description, classify_bundle().manifest, server.url, _EXAMPLES)
    assert found.cases > 50
    assert len(found.failures) <= _LARGEST[variant.title], found.failures
    if variant is VARIANTS[-1]:
        assert found.answered > 0
