"""The audit of dependencies: it fails for what is vulnerable, and never in silence."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[2] / ".ci" / "audit"
KNOWN = {
    "id": "TEST-1",
    "details": "opens doors",
    "affected": [
        {
            "package": {"name": "doors", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
        }
    ],
}


class Database(BaseHTTPRequestHandler):
    """Knows one vulnerability, of the package `doors`."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        found = {"vulns": [KNOWN]} if asked["package"]["name"] == "doors" else {}
        answer = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        """Nothing: the output is that of the audit."""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Database)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def audit(
    folder: Path, requirement: str, url: str, *first: str
) -> subprocess.CompletedProcess[str]:
    listed = folder / "requirements.txt"
    listed.write_text(requirement)
    arguments = ("-r", str(listed), "--no-deps", "--disable-pip", "--osv-url", url)
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        [AUDIT, *first, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("first", [(), ("--may-be-left-out",)])
@pytest.mark.parametrize(
    ("requirement", "status", "says"),
    [("doors==1.0\n", 1, "TEST-1"), ("windows==1.0\n", 0, "No known vulnerabilities found")],
)
def test_it_fails_where_something_is_known(
    tmp_path: Path, database: str, requirement: str, status: int, says: str, first: tuple[str, ...]
) -> None:
    done = audit(tmp_path, requirement, database, *first)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize(("first", "status"), [((), 75), (("--may-be-left-out",), 0)])
def test_without_a_network_it_says_that_nothing_was_audited(
    tmp_path: Path, first: tuple[str, ...], status: int
) -> None:
    nobody = "http://127.0.0.1:9/"  # listens there
    done = audit(tmp_path, "doors==1.0\n", nobody, *first)
    assert done.returncode == status
    assert "AUDIT LEFT OUT" in done.stderr and "nothing was audited" in done.stderr


def test_a_broken_audit_is_no_passed_one(tmp_path: Path, database: str) -> None:
    assert audit(tmp_path, "not a requirement\n", database).returncode != 0
