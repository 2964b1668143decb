"""What fuzzing found interesting, and what it found broken, is read again: without a fuzzer."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.fuzz import bodies, bundles, http

CORPUS = Path(__file__).parent / "corpus"
HARNESSES: dict[str, ModuleType] = {"http": http, "bodies": bodies, "bundles": bundles}
CASES = [(name, path) for name in HARNESSES for path in sorted((CORPUS / name).iterdir())]


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    bodies.close()


@pytest.mark.parametrize(("name", "path"), CASES, ids=lambda value: getattr(value, "name", value))
def test_an_input_of_the_corpus_breaks_no_rule(name: str, path: Path) -> None:
    HARNESSES[name].one(path.read_bytes())


def test_the_corpus_is_small() -> None:
    assert {path.parent.name for _, path in CASES} == set(HARNESSES)
    assert sum(path.stat().st_size for _, path in CASES) < 200_000
