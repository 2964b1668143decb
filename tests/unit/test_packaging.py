"""The wheel, the extras, the image: what is shipped, and that it is ours alone."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import stepdial

ROOT = Path(__file__).parents[2]
PACKAGES = ("train", "export", "serve", "loadtest")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = folder.glob("*.whl")
    return zipfile.Path(built)


@pytest.fixture(scope="module")
def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def resolve(extras: dict[str, list[str]], name: str) -> set[str]:
    """The names of the distributions that an extra asks for, through the extras it includes."""
    found = set()
    for requirement in extras[name]:
        included = re.fullmatch(r"stepdial\[(.+)\]", requirement)
        if included:
            for inner in included[1].split(","):
                found |= resolve(extras, inner.strip())
        else:
            found.add(re.split(r"[\[<>=]", requirement)[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.Path, package: str) -> None:
    shipped = set(wheel.root.namelist())
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{package}/__main__.py" in ours
    assert ours <= shipped, f"left out of the wheel: {sorted(ours - shipped)}"


def test_the_wheel_holds_nothing_else(wheel: zipfile.Path) -> None:
    top = {name.split("/")[0] for name in wheel.root.namelist()}
    metadata = f"stepdial-{stepdial.__version__}.dist-info"
    assert top == {*PACKAGES, "stepdial.py", metadata}


def test_the_wheel_installs_the_command_and_cannot_be_uploaded(wheel: zipfile.Path) -> None:
    metadata = f"stepdial-{stepdial.__version__}.dist-info"
    scripts = wheel.joinpath(metadata, "entry_points.txt").read_text()
    assert "stepdial = stepdial:main" in scripts
    assert "Private :: Do Not Upload" in wheel.joinpath(metadata, "METADATA").read_text()


@pytest.mark.parametrize("package", [*PACKAGES, "stepdial", "tests", "benchmarks"])
def test_no_other_distribution_owns_our_names(package: str) -> None:
    owners = set(importlib.metadata.packages_distributions().get(package, ()))
    assert owners <= {"stepdial"}, f"{package} is also installed by {owners - {'stepdial'}}"


def test_importing_the_server_loads_nothing_of_training() -> None:
    code = (
        "import sys, serve.app;"
        "loaded = {'torch', 'onnx', 'matplotlib', 'train', 'export'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_an_image_gets_one_runtime(extras: dict[str, list[str]]) -> None:
    cpu, gpu = resolve(extras, "serve"), resolve(extras, "gpu")
    assert cpu - gpu == {"onnxruntime"}
    assert gpu - cpu == {"onnxruntime-gpu", "tensorrt", "cuda-python"}
    assert not {"torch", "onnx"} & (cpu | gpu)


def test_dev_holds_every_extra_but_the_gpu(extras: dict[str, list[str]]) -> None:
    dev = resolve(extras, "dev")
    for name in extras.keys() - {"gpu", "dev"}:
        assert resolve(extras, name) <= dev, name
    assert not {"onnxruntime-gpu", "tensorrt"} & dev


def test_torch_is_pinned_exactly(extras: dict[str, list[str]]) -> None:
    (torch,) = [each for each in extras["train"] if re.match(r"torch\b", each)]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", torch)


# Packages of which undocumented parts are used: a new minor release may change them.
PRIVATE_PARTS = {
    "prometheus-client": "the values of counters and histograms, in serve/metrics.py",
    "uvicorn": "its protocol and request cycle, in serve/connection.py",
    "ray": "its replica and its local cluster, in deploy/ray",
}


@pytest.mark.parametrize("name", PRIVATE_PARTS)
def test_no_release_is_taken_whose_private_parts_were_not_looked_up(
    extras: dict[str, list[str]], name: str
) -> None:
    found = [
        one for lines in extras.values() for one in map(Requirement, lines) if one.name == name
    ]
    assert found
    for requirement in found:
        assert "<" in {one.operator for one in requirement.specifier}, str(requirement)


# Releases that lack what is used: a machine that has one would keep it.
TOO_OLD = [
    ("fastapi", "0.137.1"),  # routing.iter_route_contexts
    ("onnxscript", "0.5.7"),  # what the exporter of torch 2.13 imports of it
    ("ray", "2.55.1"),  # serve.ingress without an application, and broadcasts
    ("ray", "2.56.0"),  # it fails beside a newer protobuf than it was made for
]


@pytest.mark.parametrize(("name", "release"), TOO_OLD)
def test_no_release_is_taken_that_is_too_old(
    extras: dict[str, list[str]], name: str, release: str
) -> None:
    asked = [one for lines in extras.values() for one in map(Requirement, lines)]
    asked = [one for one in asked if one.name == name]
    assert asked and all(release not in one.specifier for one in asked)


@cache
def locking() -> ModuleType:
    """The script that writes the locks."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked(text: str) -> dict[str, str]:
    """The versions in a lock; each has a hash, and nothing else is said."""
    found = {}
    for entry in text.replace("\\\n", " ").splitlines():
        if entry.startswith("#"):
            continue
        name, version, *hashes = re.split(r"==|\s+", entry)
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
        assert name == canonicalize_name(name) and name not in found
        found[name] = version
    return found


@pytest.mark.parametrize("lock", locking().LOCKS, ids=lambda lock: str(lock.path.name))
def test_a_lock_has_what_is_asked_for_and_no_address(lock: Any) -> None:
    text = lock.path.read_text(encoding="utf-8")
    assert "://" not in text and "--index" not in text and "--find" not in text
    versions = locked(text)
    environment = {
        "python_version": "{}.{}".format(*lock.python),
        "sys_platform": "linux",
        "platform_machine": lock.machine,
        "extra": "",
    }
    for requirement in locking().required(lock.extra):
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        if locking().is_unlocked(lock.extra, name):
            continue
        assert name in versions, f"{requirement} is not in {lock.path.name}: make lock"
        assert requirement.specifier.contains(versions[name], prereleases=True), (
            f"{lock.path.name} has {name} {versions[name]}, not {requirement}: make lock"
        )


def test_what_no_hash_can_be_had_of_is_in_no_lock() -> None:
    names = {lock.extra: locked(lock.path.read_text()) for lock in locking().LOCKS}
    assert "torch" not in names["dev"] and "tensorrt" not in names["gpu"]


def test_every_lock_is_written_by_the_script() -> None:
    known = {lock.path.name for lock in locking().LOCKS}
    assert {path.name for path in (ROOT / "locks").iterdir()} == known


def test_the_image_takes_the_tensorrt_that_the_extra_asks_for(
    extras: dict[str, list[str]],
) -> None:
    (asked,) = [one for one in extras["gpu"] if one.startswith("tensorrt")]
    assert f"'{asked}'" in (ROOT / "Dockerfile").read_text()


@pytest.mark.long
def test_the_bill_of_materials_names_all_that_is_installed() -> None:
    written = [
        subprocess.run(
            [sys.executable, ROOT / "deploy" / "sbom.py"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for _ in range(2)
    ]
    assert written[0] == written[1]
    bill = json.loads(written[0])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {one["name"]: one["version"] for one in bill["components"]}
    own = bill["metadata"]["component"]
    assert (own["name"], own["version"]) == ("stepdial", stepdial.__version__)
    assert found | {"stepdial": own["version"]} == {
        canonicalize_name(one.metadata["Name"]): one.version
        for one in importlib.metadata.distributions()
    }
    known = {own["bom-ref"], *(one["bom-ref"] for one in bill["components"])}
    for entry in bill["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= known
    needs = {entry["ref"].split("@")[0]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert any(one.startswith("pkg:pypi/starlette@") for one in needs["pkg:pypi/fastapi"])


def test_the_changelog_opens_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## \[?([0-9][^\] ]*)", changelog, re.MULTILINE)
    assert first is not None
    assert first[1] == stepdial.__version__


def test_the_image_is_built_from_files_that_exist_and_are_let_in() -> None:
    let_in = {
        line[1:].strip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not any(word.startswith("--from") for word in words):
            copied |= {word.strip("/") for word in words[1:-1] if not word.startswith("--")}
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), f"the Dockerfile copies {name}, which does not exist"
    assert copied == let_in, "the Dockerfile and .dockerignore disagree on what goes in"


def test_the_python_of_ci_has_exact_releases() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    version = re.search(r'python-version: "3\.(\d+)"', workflow)
    assert version is not None
    assert (ROOT / "locks" / f"dev-py3{version[1]}-linux-x86_64.txt").is_file()


@pytest.mark.parametrize("newer", [11, 12, 13, 14])
def test_make_finds_a_python_beside_one_that_is_too_old(tmp_path: Path, newer: int) -> None:
    for name, status in (("python3", 1), (f"python3.{newer}", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("make", "echo"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    told = subprocess.run(
        ["make", "help"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"PYTHON=python3.{newer} " in told.stdout
