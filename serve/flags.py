"""The command line of `stepdial serve`, made from the settings.

Knows argparse; deliberately no setting by its name.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.settings import Settings, flag, variable


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was typed: folders of bundles, and the settings that have a flag."""

    bundles: tuple[Path, ...]
    flags: dict[str, Any]


def parse(argv: Sequence[str]) -> CommandLine:
    """Read the command line; unknown flags end the process with status 2, as usual."""
    options = vars(_parser().parse_args(list(argv)))
    bundles = tuple(options.pop("bundles"))
    return CommandLine(bundles, {name: text for name, text in options.items() if text is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepdial serve",
        description="Answer HTTP requests with the models of these bundles; without one, with "
        "every bundle of the zoo.",
        epilog="Every flag has an environment variable, named in brackets; a flag comes first.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "bundles", nargs="*", type=Path, metavar="BUNDLE", help="folder of a bundle to serve"
    )
    for name, field in Settings.model_fields.items():
        about = f"{field.description} [{variable(name)}]"
        if field.default is not None and name != "zoo":
            about += f" (default: {field.default})"
        about = about.replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                flag(name), action=argparse.BooleanOptionalAction, default=None, help=about
            )
        else:
            # Text as it is: the settings know what it may be, and say so.
            parser.add_argument(flag(name), default=None, metavar=_metavar(name), help=about)
    return parser


def _metavar(name: str) -> str:
    unit = name.rpartition("_")[2]
    return {"s": "SECONDS", "ms": "MS", "mb": "MIB", "bytes": "BYTES", "zoo": "FOLDER"}.get(
        unit, unit.upper()
    )
