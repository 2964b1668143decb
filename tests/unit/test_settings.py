"""Settings come from flags and the environment, and nothing misspelt goes unnoticed."""

from pathlib import Path

import pytest

from docs import generate
from serve.runtime import Device
from serve.settings import (
    OTHER_VARIABLES,
    Settings,
    SettingsError,
    check_names,
    flag,
    meaning,
    parse,
    read_config,
    variable,
)

PROJECT = Path(__file__).parents[2]


def test_defaults_are_those_of_the_documents() -> None:
    settings = Settings.read()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.queue_limit, settings.cache_mb, settings.drain_s) == (256, 128, 30.0)
    assert settings.limits.cache_bytes == 128 * 2**20
    assert settings.zoo.name == "zoo" and settings.zoo.parent == Path(__file__).parents[2]


def test_a_place_is_made_of_its_flags() -> None:
    assert Settings.read().runs_on == Device()
    flags = parse(["--device", "cuda", "--allow-cpu-fallback", "--engines", "made"]).flags
    assert Settings.read(flags).runs_on == Device("cuda", True, Path("made"))


@pytest.mark.parametrize("rows", ["batch-rows", "decode-rows"])
def test_no_call_has_more_rows_than_the_tensorrt_provider_takes(rows: str) -> None:
    def read(*more: str) -> Settings:
        return Settings.read(parse([*more, f"--{rows}", "65"]).flags)

    with pytest.raises(SettingsError, match="--device tensorrt takes at most 64 rows a call"):
        read("--device", "tensorrt")
    read("--device", "cuda")
    read("--device", "tensorrt", "--engines", "made")  # which splits them


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
        check_names({name: "1"}, Settings.model_fields)


def test_an_unknown_variable_lists_those_there_are() -> None:
    with pytest.raises(SettingsError, match="after STEPDIAL_ comes one of HOST, PORT"):
        check_names({"STEPDIAL_XYZZY": "1"}, Settings.model_fields)


@pytest.mark.parametrize(
    "name",
    [
        "STEPDIAL_SERVICE_HOST",
        "STEPDIAL_SERVICE_PORT",
        "STEPDIAL_SERVICE_PORT_HTTP",
        "STEPDIAL_PORT_8000_TCP",
        "STEPDIAL_PORT_8000_TCP_ADDR",
    ],
)
def test_variables_of_kubernetes_say_how_to_be_rid_of_them(name: str) -> None:
    # Beside it there always is one that has the name of a setting.
    service = {"STEPDIAL_PORT": "tcp://10.0.0.1:8000", name: "10.0.0.1"}
    with pytest.raises(SettingsError, match="enableServiceLinks: false"):
        Settings.read(environ=service)


def test_other_variables_are_nobodys_business() -> None:
    known = {name: "1" for name in OTHER_VARIABLES}
    others = {"PATH": "/bin", "MYSTEPDIAL_X": "1", "STEPDIAL_PORT": "1", "stepdial_host": "x"}
    check_names(known | others, Settings.model_fields)


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
        ("cors_origins", "*"),
        ("cors_origins", "https://app.example.org/"),
        ("cors_origins", "app.example.org"),
        ("cors_origins", "null"),
        ("max_connections", "0"),
        ("header_timeout_s", "0"),
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


def config(folder: Path, text: str) -> Path:
    path = folder / "stepdial.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_comes_after_flags_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'port = 1\nqueue_limit = 2\ncache_mb = 3\nzoo = "models"\ncors_origins = ["http://a"]'
    given = read_config(config(tmp_path, text))
    monkeypatch.setenv("STEPDIAL_PORT", "10")
    monkeypatch.setenv("stepdial_queue_limit", "20")
    settings = Settings.read({"port": "100"}, config=given)
    assert (settings.port, settings.queue_limit, settings.cache_mb) == (100, 20, 3)
    assert (settings.zoo, settings.cors_origins) == (Path("models"), ("http://a",))
    assert settings.drain_s == 30


def test_several_origins_are_separated_by_commas() -> None:
    origins = "https://app.example.org, http://localhost:3000,http://[::1]:80"
    assert Settings.read({"cors_origins": origins}).cors_origins == (
        "https://app.example.org",
        "http://localhost:3000",
        "http://[::1]:80",
    )
    assert Settings.read({"cors_origins": ""}).cors_origins == ()


def test_the_file_is_named_by_a_flag_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([]).config is None
    monkeypatch.setenv("STEPDIAL_CONFIG", "a.toml")
    assert parse([]).config == Path("a.toml")
    assert parse(["--config", "b.toml"]).config == Path("b.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "'prot' in .* is no setting: did you mean port"),
        ("cors_origin = []", "did you mean cors_origins"),
        ("[server]\nport = 1", "'server' in .* is no setting: see docs/settings.md"),
        ('api_keys = "sd-a-secret"', "'api_keys' in .* is no setting: did you mean api_keys_file"),
        ("port =", "not TOML"),
        ("port = 1\nport = 2", "not TOML"),
        ("port = true", "port in .* takes a value, not true or false"),
        ("drain_s = false", "drain_s in .* takes a value"),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        read_config(config(tmp_path, text))


def test_values_of_a_file_are_refused_by_name(tmp_path: Path) -> None:
    given = read_config(config(tmp_path, 'port = "eighty"'))
    with pytest.raises(SettingsError, match=r"^port of the settings file is 'eighty': "):
        Settings.read(config=given)
    assert Settings.read({"port": "80"}, config=given).port == 80
    with pytest.raises(SettingsError, match=r"cannot read the settings in .*nowhere"):
        read_config(tmp_path / "nowhere.toml")


def test_the_page_of_settings_is_current() -> None:
    written = (PROJECT / "docs/settings.md").read_text(encoding="utf-8")
    assert written == generate.settings_page(), "write it again: python -m docs.generate"
    for name in Settings.model_fields:
        assert f"`{flag(name)}`" in written and f"`{variable(name)}`" in written


def test_every_setting_has_a_flag_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert flag(name) in shown and variable(name) in shown
        assert field.description and meaning(field) in shown
    for name, default in (("trusted_proxies", "127.0.0.0/8,::1/128"), ("degrade", "on")):
        assert f"[{variable(name)}] (default: {default})" in shown


def test_the_command_line() -> None:
    line = parse(["a", "b", "--port", "1", "--access-log"])
    assert line.bundles == (Path("a"), Path("b"))
    assert line.flags == {"port": "1", "access_log": True}
    assert parse(["--no-access-log"]).flags == {"access_log": False}
    assert parse([]).flags == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prot", "1"], "unrecognized arguments: --prot; did you mean --port?\n"),
        (["--queue"], "unrecognized arguments: --queue; did you mean --queue-limit?\n"),
        (["--queue_limit=3"], ": --queue_limit=3; did you mean --queue-limit?\n"),
        (["--conf=a", "--no-acess-log"], "did you mean --config and --no-access-log?\n"),
        (["--xyzzy", "-p"], "unrecognized arguments: --xyzzy -p\n"),
    ],
)
def test_unknown_and_shortened_flags_fail_and_name_the_nearest(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(said)
