"""Runs a harness under atheris, which must be installed apart: python -m tests.fuzz.run http ...

What follows the name goes to libFuzzer: folders of inputs, -max_total_time=60 and the like.
"""

import importlib
import logging
import sys
from pathlib import Path

import atheris

HARNESSES = {
    "http": ["serve.connection", "uvicorn.protocols.http"],
    "bodies": ["serve.api", "serve.inputs", "serve.budget"],
    "bundles": ["serve.bundle"],
}


def main() -> None:
    """Fuzz until something breaks, or the time is over."""
    if len(sys.argv) < 2 or sys.argv[1] not in HARNESSES:
        sys.exit(f"name what to fuzz: {', '.join(HARNESSES)}")
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=HARNESSES[name]):
        harness = importlib.import_module(f"tests.fuzz.{name}")
    logging.disable(logging.CRITICAL)  # of refusals there is a line for every input
    words = Path(__file__).parent / f"{name}.dict"
    options = [f"-dict={words}", "-timeout=20", "-rss_limit_mb=2048", f"-max_len={1 << 12}"]
    atheris.Setup([sys.argv[0], *options, *sys.argv[1:]], harness.one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
