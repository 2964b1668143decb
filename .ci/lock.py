"""Writes the files of locks/: exact releases with the hashes of what may be installed.

One file a platform, without the address of any index. Needs uv and packaging, and an index that uv
reaches. What CI installs stays at what is installed here, so that it was tested.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
GLIBC = 28  # of manylinux_2_28, which the image and machines of CI have at least
# What no hash can be had of. Builds of torch differ by index and machine; what only those for GPUs
# ask for goes with it. Releases of TensorRT are placeholders, which fetch another file.
UNLOCKED = {"dev": ("torch", "triton", "nvidia-", "cuda-"), "gpu": ("tensorrt",)}


class Lock(NamedTuple):
    """A file: the extra it installs, and where."""

    extra: str
    python: tuple[int, int]
    machine: str

    @property
    def path(self) -> Path:
        """As the Dockerfile and the Makefile put its name together."""
        major, minor = self.python
        if self.extra == "build":  # in Python alone
            return ROOT / "locks" / "build.txt"
        return ROOT / "locks" / f"{self.extra}-py{major}{minor}-linux-{self.machine}.txt"


LOCKS = (
    Lock("serve", (3, 12), "x86_64"),
    Lock("serve", (3, 12), "aarch64"),
    Lock("serve", (3, 11), "x86_64"),
    Lock("gpu", (3, 12), "x86_64"),
    Lock("dev", (3, 11), "x86_64"),
    Lock("build", (3, 12), "x86_64"),
)


def main() -> None:
    """Write all of them."""
    for lock in LOCKS:
        lock.path.write_text(render(lock))
        print(f"wrote {lock.path.relative_to(ROOT)}")


def render(lock: Lock) -> str:
    """The text of a file."""
    lines = [f"# {lock.extra}: written by `make lock`. No address of an index belongs in here."]
    tags = supported(lock)
    for package in sorted(resolved(lock), key=lambda one: str(one["name"])):
        name = canonicalize_name(package["name"])
        if is_unlocked(lock.extra, name):
            continue
        hashes = " \\\n    ".join(f"--hash=sha256:{one}" for one in fitting(package, tags))
        lines.append(f"{name}=={package['version']} \\\n    {hashes}")
    return "\n".join(lines) + "\n"


def resolved(lock: Lock) -> list[dict[str, Any]]:
    """The packages of an extra, as uv found them."""
    with tempfile.TemporaryDirectory() as folder:
        asked, known = Path(folder, "asked.in"), Path(folder, "known.txt")
        found = Path(folder, "pylock.toml")
        asked.write_text("\n".join(map(str, required(lock.extra))))
        known.write_text("\n".join(installed()))
        subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", str(asked)),
                *("--python-version", ".".join(map(str, lock.python))),
                *("--python-platform", f"{lock.machine}-manylinux_2_{GLIBC}"),
                *("--constraints", str(known), "--format", "pylock.toml", "-o", str(found)),
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        packages: list[dict[str, Any]] = tomllib.loads(found.read_text())["packages"]
    return packages


def required(extra: str) -> list[Requirement]:
    """What pyproject.toml asks for, through the extras that an extra includes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if extra == "build":
        return [Requirement(one) for one in project["build-system"]["requires"]]
    found: list[Requirement] = []
    for one in map(Requirement, project["project"]["optional-dependencies"][extra]):
        if one.name == "stepdial":
            found += [inner for name in sorted(one.extras) for inner in required(name)]
        elif not is_unlocked(extra, one.name):
            found.append(one)
    return found


def is_unlocked(extra: str, name: str) -> bool:
    """Whether this package is installed by the range that pyproject.toml gives."""
    return name.startswith(UNLOCKED.get(extra, ()))  # no name starts with one of none


def installed() -> list[str]:
    """What is installed here, but for what has a build of its own."""
    versions = {
        canonicalize_name(one.name): one.version for one in importlib.metadata.distributions()
    }
    return [
        f"{name}=={version}"
        for name, version in sorted(versions.items())
        if "+" not in version and name not in ("stepdial", "pip", "setuptools")
    ]


def supported(lock: Lock) -> set[Tag]:
    """The wheels that the platform takes."""
    machine = lock.machine
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, GLIBC + 1)]
    platforms += [f"{old}_{machine}" for old in ("manylinux1", "manylinux2010", "manylinux2014")]
    platforms.append(f"linux_{machine}")
    interpreter = "cp{}{}".format(*lock.python)
    return {
        *cpython_tags(lock.python, platforms=platforms),
        *compatible_tags(lock.python, interpreter, platforms),
    }


def fitting(package: dict[str, Any], tags: set[Tag]) -> list[str]:
    """The hashes of the wheels that fit, or of the source where none does."""
    wheels = [
        wheel["hashes"]["sha256"]
        for wheel in package.get("wheels", ())
        if parse_wheel_filename(wheel.get("name") or wheel["url"].rpartition("/")[2])[3] & tags
    ]
    return sorted(wheels) or [package["sdist"]["hashes"]["sha256"]]


if __name__ == "__main__":
    main()
