"""Writes what is installed beside the interpreter that runs this, as CycloneDX JSON.

    python deploy/sbom.py > stepdial.cdx.json

Knows installed metadata only, so that it says what is there and not what was wanted. The same
packages give the same text.
"""

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from typing import Any

PRODUCT = "stepdial"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def main() -> None:
    """To standard output."""
    json.dump(sbom(distributions()), sys.stdout, indent=1, sort_keys=True)
    print()


def sbom(installed: Iterable[Distribution]) -> dict[str, Any]:
    """The bill of these distributions, of which one is Stepdial itself."""
    found = {canonical(one.name): one for one in installed}
    product = found.pop(PRODUCT)
    components = [component(name, one) for name, one in sorted(found.items())]
    dependencies = [
        {
            "ref": ref(name, one),
            "dependsOn": [ref(inner, found[inner]) for inner in needed(one) if inner in found],
        }
        for name, one in sorted({**found, PRODUCT: product}.items())
    ]
    content = json.dumps([components, dependencies], sort_keys=True).encode()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=hashlib.sha256(content).digest()[:16])}",
        "version": 1,
        "metadata": {"component": {**component(PRODUCT, product), "type": "application"}},
        "components": components,
        "dependencies": dependencies,
    }


def component(name: str, one: Distribution) -> dict[str, Any]:
    """One package."""
    described: dict[str, Any] = {
        "type": "library",
        "bom-ref": ref(name, one),
        "name": name,
        "version": one.version,
        "purl": ref(name, one),
    }
    if "License-Expression" in one.metadata:
        described["licenses"] = [{"expression": one.metadata["License-Expression"]}]
    elif "License" in one.metadata and "\n" not in one.metadata["License"]:
        # Some hold the whole text there.
        described["licenses"] = [{"license": {"name": one.metadata["License"]}}]
    return described


def ref(name: str, one: Distribution) -> str:
    """How a package is known everywhere."""
    return f"pkg:pypi/{name}@{one.version.replace('+', '%2B')}"


def needed(one: Distribution) -> Sequence[str]:
    """The packages that it asks for, but for those of its extras."""
    asked = [line for line in one.requires or () if "extra ==" not in line]
    found = (_NAME.match(line) for line in asked)
    return sorted({canonical(name[0]) for name in found if name})


def canonical(name: str) -> str:
    """As indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
