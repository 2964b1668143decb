"""Wrong uses of the commands on bundles: refused before the work, with what to do instead."""

from pathlib import Path

import pytest

from export.__main__ import main
from tests.fixtures.tiny_bundles import build_classify

SAID = {
    "export BUNDLE": "is a bundle already",
    "export RUN --samples 0": "--samples 0: use at least 1",
    "export RUN --samples -3": "--samples -3: use at least 1",
    "evaluate BUNDLE --samples 0": "--samples 0: use at least 1",
    "export RUN --card nowhere.json": "there is no file nowhere.json",
    "export RUN --chat-template nowhere.jinja": "there is no file nowhere.jinja",
    "export RUN --name a/b": "name is 'a/b'; use 1 to 64 of a-z",
    "export RUN --name ": "name is ''; use 1 to 64 of a-z",
    "export RUN --target triton --out BUNDLE": "exists: remove it, or name another folder",
    "export RUN --steps 0": "counts are from 1",
    "export RUN --steps ": "write counts like 1,2,4,8",
    "evaluate BUNDLE --steps ": "write counts like 1,2,4,8",
    "export RUN --precision int4": "choose one of fp32, fp16, bf16, int8",
    "export RUN": "is not a run",
    "inspect RUN": "is no folder",
    "calibrate BUNDLE --threads 0": "at least 1",
}


@pytest.mark.parametrize("line", SAID)
def test_one_line_says_what_to_do(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"RUN": tmp_path / "run", "BUNDLE": build_classify(tmp_path / "bundle").folder}
    assert main([str(named.get(word, word)) for word in line.split(" ")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"stepdial {line.split()[0]}: ") and SAID[line] in said
