"""Settings come from flags and the environment, and nothing misspelt goes unnoticed."""

from pathlib import Path

import pytest

from serve.flags import parse
from serve.runtime import Place
from serve.settings import Settings, SettingsError, check_names, flag, variable


def test_defaults_are_those_of_the_documents() -> None:
    settings = Settings.read()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.queue_limit, settings.cache_mb, settings.drain_s) == (256, 128, 30.0)
    assert settings.limits.cache_bytes == 128 * 2**20
    assert settings.zoo.name == "zoo" and settings.zoo.parent == Path(__file__).parents[2]


def test_a_place_is_made_of_its_flags() -> None:
    assert Settings.read().place == Place()
    flags = parse(["--device", "cuda", "--allow-cpu-fallback", "--engines", "made"]).flags
    assert Settings.read(flags).place == Place("cuda", True, Path("made"))


def test_flags_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPDIAL_QUEUE_LIMIT", "7")
    monkeypatch.setenv("STEPDIAL_CACHE_MB", "9")
    settings = Settings.read({"queue_limit": "8"})
    assert (settings.queue_limit, settings.cache_mb) == (8, 9)


@pytest.mark.parametrize(
    "name", ["STEPDIAL_QUEU_LIMIT", "STEPDIAL_QUEUE-LIMIT", "stepdial_queuelimit"]
)
def test_a_misspelt_variable_fails_and_names_the_right_one(name: str) -> None:
    with pytest.raises(SettingsError, match="did you mean STEPDIAL_QUEUE_LIMIT"):
        check_names({name: "1"})


def test_an_unknown_variable_lists_those_there_are() -> None:
    with pytest.raises(SettingsError, match="after STEPDIAL_ comes one of HOST, PORT"):
        check_names({"STEPDIAL_XYZZY": "1"})


def test_other_variables_are_nobodys_business() -> None:
    check_names({"PATH": "/bin", "MYSTEPDIAL_X": "1", "STEPDIAL_PORT": "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "eighty"),
        ("port", "70000"),
        ("port", "-1"),
        ("queue_limit", "0"),
        ("cache_mb", "0"),
        ("drain_s", "-1"),
        ("drain_s", "nan"),
        ("max_wait_ms", "inf"),
        ("threads", "0"),
        ("access_log", "perhaps"),
        ("log_level", "loud"),
        ("device", "gpu"),
        ("max_inputs", "65"),
        ("host", " "),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings.read({name: value})
    assert str(refused.value).startswith(f"{flag(name)} is {value!r}: ")
    monkeypatch.setenv(variable(name), value)
    with pytest.raises(SettingsError) as refused:
        Settings.read()
    assert str(refused.value).startswith(f"{variable(name)} is {value!r}: ")


def test_every_setting_has_a_flag_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert flag(name) in shown and variable(name) in shown
        assert field.description and field.description in shown


def test_the_command_line() -> None:
    line = parse(["a", "b", "--port", "1", "--access-log"])
    assert line.bundles == (Path("a"), Path("b"))
    assert line.flags == {"port": "1", "access_log": True}
    assert parse(["--no-access-log"]).flags == {"access_log": False}
    assert parse([]).flags == {}


@pytest.mark.parametrize("argument", ["--prot", "--queue", "--queue_limit=3"])
def test_unknown_and_shortened_flags_fail(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([argument])
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
