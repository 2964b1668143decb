"""`stepdial export --target`: TensorRT engines or a Triton model repository from a bundle."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.bundle import Bundle

TARGETS = ("onnx", "tensorrt", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a target."""
    parser.add_argument(
        "--target",
        choices=TARGETS,
        default="onnx",
        help="onnx: a bundle (default); tensorrt: native engines for the GPU of this machine; "
        "triton: a model repository. The last two get a folder of their own and also take a bundle",
    )
    parser.add_argument(
        "--engine-precision",
        choices=("fp32", "fp16", "bf16"),
        default="fp16",
        help="precision of the matrix products of engines (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-rows",
        type=int,
        default=64,
        metavar="ROWS",
        help="most rows per call of an engine (default: %(default)s)",
    )


def check_target(arguments: argparse.Namespace) -> None:
    """Before a run is exported for it: whether it can be made of that run, here, and there."""
    if arguments.target == "onnx":
        return
    from serve.bundle import BundleError

    if arguments.out is not None and os.path.lexists(arguments.out):
        raise BundleError("exists: remove it, or name another folder", file=str(arguments.out))
    from train.checkpoint import read_facts  # with torch

    facts = read_facts(arguments.run)
    from export.__main__ import name_of

    name = arguments.name or name_of(arguments.run) or str(facts["recipe"].get("name"))
    folder = _folder(name, arguments)
    if arguments.target == "triton":
        from export.triton import check_repository

        check_repository(name, facts.get("labels"), folder)
    else:
        from export.tensorrt import EngineRequest, check_engines

        EngineRequest(arguments.engine_precision, arguments.engine_rows)
        check_engines(name, arguments.precision, folder)


def write_target(bundle: "Bundle", arguments: argparse.Namespace) -> None:
    """Make what was asked for; in --out, or beside the other bundles under the model's name."""
    folder = _folder(bundle.manifest.name, arguments)
    if arguments.target == "triton":
        from export.triton import write_repository

        write_repository(bundle, folder)
    else:
        from export.tensorrt import EngineRequest, build_engines

        request = EngineRequest(arguments.engine_precision, arguments.engine_rows)
        build_engines(bundle, folder, request)


def _folder(name: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.out or Path("bundles") / f"{name}-{arguments.target}")
