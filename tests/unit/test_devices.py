"""Several processes train what one would have trained."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.tiny_runs import tiny_pair_recipe, tiny_text_recipe
from train.__main__ import main
from train.data.batch import Batch
from train.devices import Devices
from train.loop import train
from train.recipe import Recipe

ROOT = Path(__file__).parents[2]


def together(recipe: Recipe, folder: Path) -> None:
    """Train under torchrun, with two processes on the CPU."""
    script = folder.with_suffix(".py")
    script.write_text(
        "import json, sys\nfrom pathlib import Path\nfrom train.recipe import recipe_from\n"
        "from train.loop import train\n"
        f"recipe = recipe_from(json.loads({json.dumps(recipe.to_json())!r}), 'test')\n"
        "train(recipe, Path(sys.argv[1]), quiet=True)\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(script), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe_of, settings",
    [
        (tiny_text_recipe, ["steps.schedule=sandwich", "steps.jump=0.3", "steps.grow=0"]),
        (tiny_pair_recipe, ["optim.transport=0"]),  # rows of unequal numbers of targets
    ],
)
def test_two_processes_train_the_weights_of_one(
    recipe_of: Callable[..., Recipe], settings: list[str], tmp_path: Path
) -> None:
    """Rows of each batch are shared. Without the bias of keys, whose gradient is but rounding."""
    exact = ["model.dropout=0", "model.embed_dropout=0", "model.bias=false", "optim.lr=0.0001"]
    settings += ["optim.iterations=3", "run.accelerator=cpu"]
    recipe = recipe_of(tmp_path, *exact, *settings)
    train(recipe, tmp_path / "one", quiet=True)
    together(recipe, tmp_path / "two")
    one, two = (load_file(tmp_path / name / "state.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-6, atol=1e-6, msg=name)
    logs = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert len(logs[0]) == len(logs[1]) == 1  # only one process writes
    for key in ("iteration", "evaluations", "loss", "cost"):
        assert logs[0][0][key] == pytest.approx(logs[1][0][key], abs=2e-5)


def test_parts_and_rows_are_shared_without_rest() -> None:
    first, second = Devices("cpu"), Devices("cpu")
    first.processes = second.processes = 2
    second.rank = 1
    assert (first.main, second.main) == (True, False)
    assert [*first.parts(4, 3), *second.parts(4, 3)] == [0, 2, 1, 3]
    assert list(first.parts(3, 4)) == list(second.parts(3, 4)) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"optim\.batch or optim\.accumulate"):
        first.parts(3, 3)
    batch = Batch((torch.arange(8).view(4, 2),), torch.arange(4))
    assert first.share(batch, 4).targets.tolist() == [0, 1, 2, 3]  # whole parts
    assert first.share(batch, 3).targets.tolist() == [0, 2]
    assert second.share(batch, 3).inputs[0].tolist() == [[2, 3], [6, 7]]
    with pytest.raises(ValueError, match="too little data"):
        first.share(Batch((torch.zeros(3, 2),), torch.zeros(3)), 3)


def test_a_gpu_that_is_not_there_is_said() -> None:
    if torch.cuda.is_available():
        assert Devices("auto").device.type == "cuda"
    else:
        assert Devices("auto").device.type == "cpu"
        with pytest.raises(ValueError, match=r"run\.accelerator"):
            Devices("cuda")


def test_precision_is_that_of_the_recipe_but_bf16_is_never_emulated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    with Devices("cpu", "fp32").autocast():
        assert (x @ weight).dtype == torch.float32
    # Any AVX-512 emulates it, says mkldnn: three times as slow as fp32 on a Xeon of 2017.
    for machine, mkldnn, avx512, amx, has in (
        ("x86_64", True, True, False, True),
        ("x86_64", True, False, True, True),
        ("x86_64", True, False, False, False),
        ("aarch64", True, False, False, True),
        ("aarch64", False, False, False, False),
    ):
        caplog.clear()
        for owner, name, value in (
            (platform, "machine", machine),
            (torch.ops.mkldnn, "_is_mkldnn_bf16_supported", mkldnn),
            (torch.cpu, "_is_avx512_bf16_supported", avx512),
            (torch.cpu, "_is_amx_tile_supported", amx),
        ):
            monkeypatch.setattr(owner, name, lambda value=value: value)
        with Devices("cpu", "bf16").autocast():
            assert (x @ weight).dtype == (torch.bfloat16 if has else torch.float32)
        assert ("no bf16 arithmetic" in caplog.text) != has


def test_the_device_is_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 200)
    arguments = ["train", "shakespeare", "--data", str(text), "--out", str(tmp_path / "run")]
    assert main([*arguments, "--device", "cuda"]) == 2
    assert "no CUDA device: choose cpu" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_library_below_prints_nothing_of_its_own() -> None:
    # In a process of its own: the library takes standard error when it is imported.
    program = "from train.devices import Devices; Devices('cpu', 'bf16')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr in (
        "",
        "training in fp32: this CPU has no bf16 arithmetic, which the recipe asks for\n",
    )
