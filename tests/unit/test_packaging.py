"""The wheel, the extras, the image: what is shipped, and that it is ours alone."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

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
