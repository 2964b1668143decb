"""The Helm chart: rendered by Helm itself, held against the schemas of Kubernetes, and read.

Helm comes in a package for few systems; elsewhere these tests are left out, loudly.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.settings import Settings, check_names, variable

try:
    import helm_python
    import kubernetes_validate
except ImportError as missing:
    pytest.skip(
        f"{missing.name} is not installed: pip install '.[deploy]' on Linux x86-64",
        allow_module_level=True,
    )

CHART = Path(__file__).parents[2] / "deploy/helm/stepdial"
RULES = Path(__file__).parents[2] / "deploy/prometheus/rules.yml"
CLUSTERS = ("1.27", "1.37")
# What only the Prometheus operator knows.
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
KEYS = '[[key]]\nname = "ci"\nsha256 = "' + 64 * "0" + '"\n'

EVERYTHING: dict[str, Any] = {
    "settings": {"max_body_bytes": 4194304, "degrade": False, "stall_s": 2.5, "log_level": "info"},
    "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    "bundles": {"paths": ["/bundles/a", "/bundles/b"], "claim": "models"},
    "apiKeys": {"toml": KEYS},
    "gpu": {"enabled": True, "runtimeClassName": "nvidia"},
    "nodeSelector": {"pool": "serving"},
    "tolerations": [{"key": "serving", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "podAnnotations": {"team": "a"},
    "image": {"pullSecrets": [{"name": "registry"}]},
    "autoscaling": {"enabled": True, "queueDepth": 4, "inFlight": 1000000},
    "networkPolicy": {"egress": [{"ports": [{"port": 4318}]}]},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "keySecret": {"name": "scraper", "key": "token"},
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "init image": {"bundles": {"paths": ["/bundles/a"], "initImage": "bundles:1"}},
    "image volume": {"bundles": {"paths": ["/bundles/a"], "imageVolume": "bundles:1"}},
    "a key of one's own": {"apiKeys": {"existingSecret": "mine"}},
    "bare": {
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "service": {"type": "LoadBalancer", "port": 8080},
    },
}

Document = dict[str, Any]


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


def render(chart: helm_python.Chart, values: Mapping[str, Any]) -> dict[str, Document]:
    """The objects of a release called `dial`, by kind; each kind comes once."""
    rendered = chart.render(dict(values), name="dial", namespace="models")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    found = [document for text in texts for document in yaml.safe_load_all(text) if document]
    kinds = {document["kind"]: document for document in found}
    assert len(kinds) == len(found)
    return kinds


def pod(kinds: Mapping[str, Document]) -> Document:
    found: Document = kinds["Deployment"]["spec"]["template"]["spec"]
    return found


def test_helm_finds_nothing_wrong() -> None:
    for values in VALUES.values():
        report = helm_python.lint(CHART, values, strict=True, kube_version="v1.31.0")
        # An icon is recommended; that is all there may be.
        worse = [message for message in report["messages"] if message["severity"] > 1]
        assert (worse, report["errors"]) == ([], [])


@pytest.mark.parametrize(
    ("case", "version"),
    # Volumes from images came with Kubernetes 1.31.
    [pair for pair in product(VALUES, CLUSTERS) if pair != ("image volume", "1.27")],
)
def test_kubernetes_knows_every_field(chart: helm_python.Chart, case: str, version: str) -> None:
    for kind, document in render(chart, VALUES[case]).items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_would_find_a_field_that_is_misspelt(chart: helm_python.Chart) -> None:
    kinds = render(chart, {})
    pod(kinds)["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(kinds["Deployment"], CLUSTERS[0], strict=True)


@pytest.mark.parametrize("case", VALUES)
def test_labels_select_the_pods(chart: helm_python.Chart, case: str) -> None:
    kinds = render(chart, VALUES[case])
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [kinds["Deployment"]["spec"]["selector"]["matchLabels"]]
    selectors += [kinds["Service"]["spec"]["selector"]]
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        if kind in kinds:
            selectors.append(kinds[kind]["spec"][key]["matchLabels"])
    assert all(selector.items() <= labels for selector in selectors)


def test_each_pod_drops_what_it_does_not_need(chart: helm_python.Chart) -> None:
    for values in VALUES.values():
        spec = pod(render(chart, values))
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001  # as the Dockerfile's USER
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            writable = {
                mount["mountPath"]
                for mount in container["volumeMounts"]
                if not mount.get("readOnly")
            }
            assert writable in ({"/tmp"}, {"/to"})
            assert "memory" in container["resources"]["limits"]


def test_variables_of_the_namespace_cannot_be_taken_for_settings(chart: helm_python.Chart) -> None:
    # For a Service called stepdial Kubernetes would set STEPDIAL_PORT=tcp://...
    assert pod(render(chart, {}))["enableServiceLinks"] is False


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_the_server_takes_the_settings(
    chart: helm_python.Chart, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = render(chart, values)
    data: dict[str, str] = kinds["ConfigMap"]["data"]
    check_names(data, Settings.model_fields)
    for name, text in data.items():
        monkeypatch.setenv(name, text)
    settings = Settings.read()
    for field, value in values.get("settings", {}).items():
        assert getattr(settings, field) == value, data[variable(field)]
    for named in pod(kinds)["containers"][0].get("env", ()):
        if named["name"].startswith("STEPDIAL_"):
            check_names({named["name"]: ""}, Settings.model_fields)


def test_there_is_time_to_drain(chart: helm_python.Chart) -> None:
    assert chart.values["settings"]["drain_s"] == Settings.model_fields["drain_s"].default
    for drain_s in (0, 30, 44.5):
        spec = pod(render(chart, {"settings": {"drain_s": drain_s}}))
        before_s = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        # Then errors are told for half a second, and it ends within 4 s more.
        assert spec["terminationGracePeriodSeconds"] >= before_s + math.ceil(drain_s) + 5


def test_probes(chart: helm_python.Chart) -> None:
    (container,) = pod(render(chart, {"startS": 61}))["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/health/live", "port": "health"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "health"}
    assert container["readinessProbe"]["failureThreshold"] > 1
    start = container["startupProbe"]
    assert start["httpGet"] == {"path": "/health/ready", "port": "health"}
    assert start["failureThreshold"] * start["periodSeconds"] == 62


def test_probes_have_a_port_that_clients_do_not_reach(chart: helm_python.Chart) -> None:
    kinds = render(chart, {"healthPort": 9000})
    assert kinds["ConfigMap"]["data"]["STEPDIAL_HEALTH_PORT"] == "9000"
    (container,) = pod(kinds)["containers"]
    assert {"name": "health", "containerPort": 9000} in container["ports"]
    assert [port["targetPort"] for port in kinds["Service"]["spec"]["ports"]] == ["http"]
    asking, watching = kinds["NetworkPolicy"]["spec"]["ingress"]
    assert asking["from"] == [{"podSelector": {}}]
    assert [port["port"] for port in asking["ports"]] == ["http"]
    assert "namespaceSelector" in watching["from"][0]
    assert [port["port"] for port in watching["ports"]] == ["health"]
    nobody = render(chart, {"networkPolicy": {"metricsFrom": []}})["NetworkPolicy"]
    assert len(nobody["spec"]["ingress"]) == 1


def test_a_gpu_is_asked_for_in_every_way(chart: helm_python.Chart) -> None:
    kinds = render(chart, EVERYTHING)
    spec = pod(kinds)
    (container,) = spec["containers"]
    assert container["image"] == "stepdial:0.1.0-gpu"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true", "pool": "serving"}
    assert [taint["key"] for taint in spec["tolerations"]] == ["serving", "nvidia.com/gpu"]
    assert kinds["ConfigMap"]["data"]["STEPDIAL_DEVICE"] == "cuda"
    scratch = {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}
    assert scratch in spec["volumes"]
    # Engines are built into it.
    builds = pod(render(chart, {"gpu": {"enabled": True, "device": "tensorrt"}}))
    assert builds["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    # None of them, as Helm says it.
    none: dict[str, Any] = {"nodeSelector": None, "tolerations": None}
    bare = {"gpu": {"enabled": True, **none}, **none}
    assert not {"nodeSelector", "tolerations"} & pod(render(chart, bare)).keys()
    without = pod(render(chart, {}))
    assert not {"nodeSelector", "tolerations", "runtimeClassName"} & without.keys()


@pytest.mark.parametrize(
    ("case", "volume"),
    [
        ("everything", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}),
        ("init image", {"emptyDir": {}}),
        ("image volume", {"image": {"reference": "bundles:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_bundles_come_from_a_claim_or_an_image(
    chart: helm_python.Chart, case: str, volume: Document
) -> None:
    spec = pod(render(chart, VALUES[case]))
    (container,) = spec["containers"]
    assert container["args"] == VALUES[case]["bundles"]["paths"]
    assert {"name": "bundles", **volume} in spec["volumes"]
    mount = {"name": "bundles", "mountPath": "/bundles", "readOnly": True}
    assert mount in container["volumeMounts"]


def test_load_and_waiting_scale_it(chart: helm_python.Chart) -> None:
    kinds = render(chart, EVERYTHING)
    assert "replicas" not in kinds["Deployment"]["spec"]
    metrics = kinds["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metrics[0]["resource"]["target"]["averageUtilization"] == 80
    assert {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for metric in metrics[1:]
    } == {"stepdial_queue_depth": "4", "stepdial_in_flight": "1000000"}


def test_prometheus_is_told_of_the_metrics_and_the_rules(chart: helm_python.Chart) -> None:
    kinds = render(chart, EVERYTHING)
    (endpoint,) = kinds["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["targetPort"], endpoint["path"]) == ("health", "/metrics")
    assert "port" not in endpoint  # which would be one of the Service
    assert endpoint["authorization"] == {"credentials": {"name": "scraper", "key": "token"}}
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert kinds["PrometheusRule"]["spec"] == rules


def test_a_new_key_starts_new_pods(chart: helm_python.Chart) -> None:
    found = set()
    for values in ({}, {"apiKeys": {"toml": KEYS}}, {"settings": {"cache_mb": 1}}):
        annotations = render(chart, values)["Deployment"]["spec"]["template"]["metadata"]
        found.add(tuple(annotations["annotations"].values()))
    assert len(found) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"setings": {}},
        {"image": {"tags": "1"}},
        {"settings": {"port": 1}},
        {"settings": {"health_port": 8001}},
        {"healthPort": 8000},
        {"settings": {"drain_s": None}},
        {"settings": {"Cache-MB": 1}},
        {"replicas": -1},
        {"gpu": {"device": "cpu"}},
        {"bundles": {"paths": ["relative"]}},
        {"apiKeys": {"toml": "sd-a-key-itself"}},
        {"podDisruptionBudget": {"maxUnavailable": "half"}},
    ],
)
def test_values_that_cannot_be_are_refused(
    chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    with pytest.raises(helm_python.HelmError):
        chart.render(values, name="dial")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"apiKeys": {"toml": KEYS, "existingSecret": "a"}}, "existingSecret or toml"),
        ({"bundles": {"paths": ["/b"], "claim": "a", "initImage": "b"}}, "set one of claim"),
        ({"bundles": {"claim": "a"}}, "name the folders"),
        ({"apiKeys": {"toml": KEYS}, "serviceMonitor": {"enabled": True}}, "needs an API key"),
        ({"autoscaling": {"enabled": True, "cpu": 0}}, "set one of cpu"),
        (
            {"serviceMonitor": {"enabled": True, "keySecret": {"name": "scraper"}}},
            "set both name and key",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(
    chart: helm_python.Chart, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(helm_python.HelmError, match=told):
        chart.render(values, name="dial")
