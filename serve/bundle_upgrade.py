"""Manifests of older schema versions, read as if they had been written today.

Knows what each version lacked; the folder itself stays as it is, hashes included.
"""

from typing import Any

from serve.bundle_fields import BundleError

OLDEST_VERSION = 1
# What version 2 added, beside a rung's `encoder` and a tokenizer's `bos_id` and `eos_id`.
_ADDED = ("depth", "cache", "target_max_tokens")


def upgraded(value: dict[str, Any]) -> dict[str, Any]:
    """A manifest of version 1 as one of version 2: every model was one ODE over text.

    What is malformed stays so, for the checks of version 2 to name.
    """
    for key in _ADDED:
        if key in value:
            raise BundleError("is no key of version 1; export the bundle again", field=key)
    newer = dict(value)
    newer["schema_version"] = 2
    newer["depth"] = "ode"
    newer["cache"] = "kv" if value.get("task") == "generate" else "none"
    newer["target_max_tokens"] = None
    if isinstance(value.get("tokenizer"), dict):
        newer["tokenizer"] = {"bos_id": None, "eos_id": None} | value["tokenizer"]
    if isinstance(value.get("rungs"), list):
        newer["rungs"] = [
            {"encoder": None} | rung if isinstance(rung, dict) else rung for rung in value["rungs"]
        ]
    return newer
