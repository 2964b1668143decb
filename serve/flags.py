"""The command line of `stepdial serve`, made from the settings.

Knows argparse; deliberately no setting by its name.
"""

import argparse
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.setting_names import CONFIG_VARIABLE, OTHER_VARIABLES, flag, nearest, variable
from serve.settings import Settings


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was typed: folders of bundles, and the settings that have a flag."""

    bundles: tuple[Path, ...]
    flags: dict[str, Any]
    config: Path | None = None  # the file of settings
    new_key: str | None = None  # the name of a key to make instead of serving


def parse(argv: Sequence[str]) -> CommandLine:
    """Read the command line; unknown flags end the process with status 2, as usual."""
    parser = _parser()
    known, unknown = parser.parse_known_args(list(argv))
    options = vars(known)
    if unknown:
        parser.error(_unknown_text(unknown, options))
    bundles, new_key = tuple(options.pop("bundles")), options.pop("make_key")
    config = options.pop("config") or os.environ.get(CONFIG_VARIABLE)
    return CommandLine(
        bundles,
        {name: text for name, text in options.items() if text is not None},
        None if config is None else Path(config),
        new_key,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepdial serve",
        description="Answer HTTP requests with the models of these bundles; without one, with "
        "every bundle of the zoo.",
        epilog="Every setting has an environment variable, named in brackets, and may stand in "
        "the file that --config names, without dashes. Flags come before the environment, that "
        "before the file. Other variables: "
        + "; ".join(f"{name}: {about}" for name, about in OTHER_VARIABLES.items())
        + ".",
        allow_abbrev=False,
    )
    parser.add_argument(
        "bundles", nargs="*", type=Path, metavar="BUNDLE", help="folder of a bundle to serve"
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"read settings from this TOML file [{CONFIG_VARIABLE}]"
    )
    parser.add_argument(
        "--make-key",
        metavar="NAME",
        help="show a new API key of this name, write what --api-keys-file needs to know of it to "
        "standard output, and end",
    )
    for name, field in Settings.model_fields.items():
        about = f"{field.description} [{variable(name)}]"
        if field.default not in (None, ()) and name != "zoo":
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


def _unknown_text(unknown: Sequence[str], options: Collection[str]) -> str:
    """What argparse says, and what misspelt flags were probably meant to be."""
    fields = Settings.model_fields.items()
    switches = [f"no_{name}" for name, field in fields if field.annotation is bool]
    # Without the dashes, which would make short names more alike than they are.
    names = [flag(name).removeprefix("--") for name in (*options, *switches) if name != "bundles"]
    typed = [word[2:].partition("=")[0] for word in unknown if word.startswith("--")]
    meant = [f"--{close}" for close in (nearest(word, names) for word in typed) if close]
    hint = f"; did you mean {' and '.join(meant)}?" if meant else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


def _metavar(name: str) -> str:
    unit = name.rpartition("_")[2]
    return {"s": "SECONDS", "ms": "MS", "mb": "MIB", "bytes": "BYTES", "zoo": "FOLDER"}.get(
        unit, unit.upper()
    )
