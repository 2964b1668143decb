"""The dashboard and the alert rules ask for what a real server under load exports.

Where Debian's prometheus is installed, it scrapes that server and evaluates every query.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve.bundle import Calibration, Level
from serve.metrics import Metrics
from tests.fixtures.tiny_bundles import CORPUS, build_classify
from tests.fixtures.tiny_folders import generate_bundle
from tests.server_process import ServerProcess, free_port, server_process

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/stepdial.json").read_text(encoding="utf-8"))
RULES_FILE = DEPLOY / "prometheus/rules.yml"
RULES = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"][0]["rules"]
SCRAPED = {"job", "instance", "namespace"}  # labels that whoever scrapes adds
# What only something broken or overloaded counts; the load here does not bring that about.
UNCOUNTED = re.compile("stepdial_(runtime_failures|late_calls|terminated_calls|rejected)_total")
_METRIC = re.compile(r"(?<![\w:])(stepdial_\w+)(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_LABEL = re.compile(r'(\w+)[=!]~?=?"')
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? \S+$", re.MULTILINE)
_PATIENCE_S = 20.0


def dashboard_queries() -> dict[str, str]:
    """Every query of the dashboard, as Grafana would send it for all models and replicas."""
    queries = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "1m")
            query = re.sub(r"\$(model|instance)\b", ".*", query)
            assert "$" not in query, query
            queries[f"{panel['title']} ({panel['id']}{target['refId']})"] = query
    return queries


def rule_queries() -> dict[str, str]:
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}


def send_load(url: str) -> None:
    """A request of each kind that the dashboard tells apart."""
    with httpx.Client(base_url=url, timeout=30) as client:
        early = {"model": "sure", "input": [*CORPUS], "max_disagreement": 0.05}
        assert client.post("/v1/classify", json=early).status_code == 200
        written = {"prompt": "To be", "max_tokens": 24, "temperature": 0}
        for budget in ({}, {"steps": 1}, {"deadline_ms": 20_000}):
            assert client.post("/v1/generate", json=written | budget).status_code == 200
        refused = written | {"steps": 99}
        assert client.post("/v1/generate", json=refused).status_code == 422
        for _ in range(3):  # a row runs ahead once the plain way has been tried
            long = client.post("/v1/generate", json=written | {"max_tokens": 140})
            assert long.status_code == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    sure = build_classify(
        tmp_path_factory.mktemp("sure") / "sure",
        name="sure",
        calibration=Calibration(
            rows=3000, confidence=0.95, source="made up", levels=(Level(0.05, 0.2, 2.0, 0.01),)
        ),
    )
    # Every early answer is compared with that of all steps.
    with server_process([sure.folder, generate_bundle().folder], "--recheck-share", "1") as running:
        send_load(running.url)
        yield running


@pytest.fixture(scope="module")
def exported(server: ServerProcess) -> dict[str, set[str]]:
    """The labels of every sample that the server exports."""
    text = httpx.get(f"{server.url}/metrics").text
    metrics = Metrics()
    for uncounted in (metrics.runtime_failures, metrics.late_calls, metrics.terminated_calls):
        uncounted.labels("any")
    metrics.rejected.labels("any")
    found: dict[str, set[str]] = {}
    for name, labels in _SAMPLE.findall(text + metrics.exposition().decode()):
        found.setdefault(name, set()).update(_LABEL.findall(labels))
    assert found["stepdial_batch_rows_bucket"] == {"model", "kind", "le"}
    return found


@pytest.mark.parametrize(("name", "query"), (dashboard_queries() | rule_queries()).items())
def test_each_metric_and_label_of_a_query_exists(
    name: str, query: str, exported: dict[str, set[str]]
) -> None:
    together = set()
    for metric, matchers in _METRIC.findall(query):
        assert metric in exported, f"{name} asks for {metric}, which is not exported"
        known = exported[metric] | SCRAPED
        assert set(_LABEL.findall(matchers)) <= known, f"{name}: {metric} has {known}"
        together |= known
    for labels in _GROUPED.findall(query):
        assert set(labels.split(", ")) <= together, f"{name} groups by {labels}"


def test_every_metric_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = " ".join(dashboard_queries().values())
    left_out = {
        name
        for name in exported
        if re.sub("_(bucket|sum|count)$", "", name) not in shown
        # The dashboard shows the evaluations; steps differ from them by a factor.
        and name not in ("stepdial_steps_total", "stepdial_process_virtual_memory_bytes")
    }
    assert left_out == set()


def test_panels_stand_side_by_side_and_have_names() -> None:
    panels = DASHBOARD["panels"]
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Prometheus with our rules, scraping one server every second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES_FILE)],
        "scrape_configs": [{"job_name": "stepdial", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command += [f"--web.listen-address={address}", "--log.level=error"]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", timeout=10) as client:
                await_start(client, f"http://{address}/-/ready")
                yield client
        finally:
            process.terminate()


def await_start(client: httpx.Client, probe: str) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if client.get(probe).status_code == 200:
                return
        except httpx.ConnectError:
            pass
        assert time.monotonic() < end_s, f"Prometheus did not start in {_PATIENCE_S:g} s"
        time.sleep(0.1)


def ask(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    response = client.get("/query", params={"query": query})
    assert response.status_code == 200, f"{query}: {response.text}"
    found: list[dict[str, Any]] = response.json()["data"]["result"]
    return found


def wait_for(client: httpx.Client, query: str) -> None:
    """Until a query finds something."""
    end_s = time.monotonic() + _PATIENCE_S
    while not ask(client, query):
        assert time.monotonic() < end_s, f"{query} found nothing in {_PATIENCE_S:g} s"
        time.sleep(0.2)


@pytest.mark.long
def test_prometheus_answers_every_query(server: ServerProcess, tmp_path: Path) -> None:
    with prometheus(tmp_path, f"127.0.0.1:{server.port}") as client:
        wait_for(client, 'count_over_time(up{job="stepdial"}[1m]) >= 1')
        send_load(server.url)
        wait_for(client, "increase(stepdial_tokens_total[1m]) > 0")
        wait_for(client, "increase(stepdial_rechecked_total[1h]) > 0")
        for name, query in dashboard_queries().items():
            found = ask(client, query)
            if not UNCOUNTED.search(query):
                assert found, f"{name} shows nothing: {query}"
                values = [float(result["value"][1]) for result in found]
                assert any(value == value for value in values), f"{name}: {values}"
        # Another evaluation, so that each rule has had one with samples.
        wait_for(client, "stepdial:deadline_attainment:ratio_rate5m == 1")
        (group,) = client.get("/rules").json()["data"]["groups"]
        assert len(group["rules"]) == len(RULES)
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
            assert rule["type"] == "recording" or rule["state"] == "inactive", rule
