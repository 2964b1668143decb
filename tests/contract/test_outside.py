"""The face of Stepdial changes only on purpose: every change shows in a golden file."""

import pytest

import stepdial
from tests.contract import outside

RENEW = "if this is meant, renew it: python -m tests.contract.outside"
HELP = {"help.txt": (), **{f"help-{'-'.join(c)}.txt": c for c in outside.COMMANDS}}


def golden(name: str) -> str:
    return (outside.GOLDEN / name).read_text(encoding="utf-8")


def words(text: str) -> list[str]:
    """Versions of Python break the lines of a help text differently."""
    return text.split()


def test_routes_and_shapes_are_as_kept() -> None:
    assert outside.openapi() == golden("openapi.json"), RENEW


def test_metrics_are_as_kept() -> None:
    assert outside.metrics() == golden("metrics.txt"), RENEW


@pytest.mark.parametrize("name", HELP)
def test_the_help_of_every_command_is_as_kept(name: str) -> None:
    assert words(outside.help_of(*HELP[name])) == words(golden(name)), RENEW


def test_every_command_has_its_help_kept() -> None:
    kept = {path.name for path in outside.GOLDEN.glob("help-*.txt")}
    assert kept == HELP.keys() - {"help.txt"}, RENEW
    assert {f"help-{name}.txt" for name in stepdial.COMMANDS} <= kept
