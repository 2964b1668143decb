"""The settings file: TOML, one key a setting, named as the setting is.

Knows TOML and the names of settings; deliberately not what values they may have.
"""

import tomllib
from pathlib import Path
from typing import Any

from serve.setting_names import SettingsError, nearest
from serve.settings import Settings


def read_config(path: Path) -> dict[str, Any]:
    """What the file sets; SettingsError where it cannot be read or sets what is no setting."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings in {path}: {error.strerror}") from None
    except ValueError as error:  # neither UTF-8 nor TOML
        raise SettingsError(f"the settings in {path} are not TOML: {error}") from None
    for name in given:
        if name not in Settings.model_fields:
            close = nearest(name, Settings.model_fields)
            hint = f"did you mean {close}?" if close else "see docs/settings.md for those there are"
            raise SettingsError(f"{name!r} in {path} is no setting: {hint}")
    return given
