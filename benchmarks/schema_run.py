"""One run of schemathesis over an OpenAPI document, as a process of its own.

Knows its command line and its report; deliberately neither documents nor servers.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Description = dict[str, Any]
Report = Mapping[str, Any]

_RUN_S = 3600.0


def run_schemathesis(
    description: Description, url: str, config: str, examples: int, *flags: str
) -> Report:
    """Its report: every check, deterministic; SystemExit if it did not get to the end.

    `config` is TOML; positive and negative data, in all phases, where the flags say nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "description.json").write_text(json.dumps(description), encoding="utf-8")
        (Path(folder) / "settings.toml").write_text(config, encoding="utf-8")
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "settings.toml"]
        command += ["run", "description.json", "--url", url, "--checks", "all", "--mode", "all"]
        command += ["--max-examples", str(examples), "--generation-deterministic"]
        command += ["--continue-on-failure", "--report", "json", "--report-json-path", "found.json"]
        ended = subprocess.run(
            [*command, *flags],
            cwd=folder,
            env={**os.environ, "PYTHONWARNINGS": "default"},
            capture_output=True,
            text=True,
            timeout=_RUN_S,
            check=False,
        )
        found = Path(folder) / "found.json"
        if not found.is_file():
            raise SystemExit(f"schemathesis did not run:\n{ended.stdout}{ended.stderr}")
        report: Report = json.loads(found.read_text(encoding="utf-8"))
    check_complete(report)
    return report


def check_complete(report: Report) -> None:
    """SystemExit unless all that was to be tried was."""
    if not report["complete"] or report["errors"]:
        raise SystemExit(f"schemathesis did not finish: {report['errors']}")


def failures_of(report: Report) -> tuple[str, ...]:
    """The unique failures: where, and of which check."""
    return tuple(
        f"{operation}: {one['title']}"
        for one in report["failures"]
        for operation in one["operations"]
    )


def accepted_of(report: Report, operations: Sequence[str]) -> int:
    """How many requests with valid data these operations answered with 2xx."""
    return sum(
        phase["accepted"]
        for operation in operations
        for phase in report["valid_rates"].get(operation, {}).values()
    )
