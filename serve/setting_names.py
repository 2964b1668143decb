"""What settings are called on the command line and in the environment, and what was meant instead.

Knows names; deliberately not which settings there are.
"""

import difflib
import re
from collections.abc import Collection, Mapping

PREFIX = "STEPDIAL_"
CONFIG_VARIABLE = "STEPDIAL_CONFIG"
KEYS_VARIABLE = "STEPDIAL_API_KEYS"
ADMIN_KEY_VARIABLE = "STEPDIAL_ADMIN_KEY"
# No settings: one names the file of settings, the others are nothing to show on a command line.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "file of settings, as --config names it",
    KEYS_VARIABLE: "API keys themselves, separated by commas; only their digests are kept",
    ADMIN_KEY_VARIABLE: "the same for whoever may load and unload models",
}
# Named like settings, but read by the tests: the browser that drives the page, and the description
# of the Open Inference Protocol.
_NOT_SETTINGS = frozenset({*OTHER_VARIABLES, "STEPDIAL_CHROMIUM", "STEPDIAL_OIP_DESCRIPTION"})

# What Kubernetes tells every pod of a Service that is named stepdial.
_OF_KUBERNETES = re.compile(r"STEPDIAL_(SERVICE_(HOST|PORT(_.*)?)|PORT_[0-9]+_.*)")


class SettingsError(ValueError):
    """A setting that cannot be used; the message says which, and what it may be."""


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + field.upper()


def flag(field: str) -> str:
    """The command-line flag of a setting."""
    return "--" + field.replace("_", "-")


def nearest(name: str, known: Collection[str]) -> str | None:
    """What a misspelt name was probably meant to be."""
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None


def check_names(environ: Mapping[str, str], settings: Collection[str]) -> None:
    """Refuse STEPDIAL_ variables that are no setting: a misspelt one would do nothing, silently."""
    known = {variable(field) for field in settings} | _NOT_SETTINGS
    # Without the prefix, which would make any two names alike.
    rests = [field.upper() for field in settings]
    rests += [other.removeprefix(PREFIX) for other in OTHER_VARIABLES]
    for name in environ:
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        if _OF_KUBERNETES.fullmatch(name):
            raise SettingsError(
                f"the environment variable {name} is no setting: Kubernetes sets it for a Service "
                "named stepdial: give the pod enableServiceLinks: false, or rename the Service"
            )
        close = nearest(name.upper().removeprefix(PREFIX), rests)
        hint = (
            f"did you mean {PREFIX}{close}?"
            if close
            else f"after {PREFIX} comes one of {', '.join(rests)}"
        )
        raise SettingsError(f"the environment variable {name} is no setting: {hint}")
