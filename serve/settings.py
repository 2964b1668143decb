"""Settings of the server: each is a flag, an environment variable and a key of the settings file.

The flags of `stepdial serve` are made from the class `Settings`; misspelt names fail at start.
"""

import argparse
import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from serve.engine.job import Limits
from serve.engine.watchdog import Patience
from serve.logs import LogFormat
from serve.runtime.protocol import Device, Place

# What settings are called on the command line and in the environment, and what was meant instead.


PREFIX = "STEPDIAL_"
CONFIG_VARIABLE = "STEPDIAL_CONFIG"
KEYS_VARIABLE = "STEPDIAL_API_KEYS"
ADMIN_KEY_VARIABLE = "STEPDIAL_ADMIN_KEY"
# No settings: one names the file of settings, the others are nothing to show on a command line.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "file of settings, as --config names it",
    KEYS_VARIABLE: "API keys themselves, separated by commas; only their digests are kept",
    ADMIN_KEY_VARIABLE: "the same for keys that may load and unload models",
}
# Named like settings, but read by the tests: the browser that drives the page, and the description
# of the Open Inference Protocol.
_NOT_SETTINGS = frozenset({*OTHER_VARIABLES, "STEPDIAL_CHROMIUM", "STEPDIAL_OIP_DESCRIPTION"})

# What Kubernetes tells every pod of a Service that is named stepdial.
_OF_KUBERNETES = re.compile(r"STEPDIAL_(SERVICE_(HOST|PORT(_.*)?)|PORT_[0-9]+_.*)")


class SettingsError(ValueError):
    """A setting that cannot be used; the message says which, and what it may be."""


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + field.upper()


def flag(field: str) -> str:
    """The command-line flag of a setting."""
    return "--" + field.replace("_", "-")


def nearest(name: str, known: Collection[str]) -> str | None:
    """What a misspelt name was probably meant to be."""
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None


def check_names(environ: Mapping[str, str], settings: Collection[str]) -> None:
    """Refuse STEPDIAL_ variables that are no setting: a misspelt one would do nothing, silently."""
    known = {variable(field) for field in settings} | _NOT_SETTINGS
    # Without the prefix, which would make any two names alike.
    rests = [field.upper() for field in settings]
    rests += [other.removeprefix(PREFIX) for other in OTHER_VARIABLES]
    for name in environ:
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        if _OF_KUBERNETES.fullmatch(name):
            raise SettingsError(
                f"the environment variable {name} is no setting: Kubernetes sets it for a Service "
                "named stepdial: give the pod enableServiceLinks: false, or rename the Service"
            )
        close = nearest(name.upper().removeprefix(PREFIX), rests)
        hint = (
            f"did you mean {PREFIX}{close}?"
            if close
            else f"after {PREFIX} comes one of {', '.join(rests)}"
        )
        raise SettingsError(f"the environment variable {name} is no setting: {hint}")


_PROJECT = Path(__file__).resolve().parent.parent
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class Settings(BaseSettings):
    """How to serve."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="port to listen on; 0 takes a free one")
    ] = 8000
    health_port: Annotated[
        int | None,
        Field(
            ge=0,
            le=65535,
            description="a port more for /health, /health/live, /health/ready and /metrics alone, "
            "which connections of clients cannot crowd out; 0 takes a free one",
        ),
    ] = None
    health_host: Annotated[
        str | None, Field(description="address of that port (default: that of --host)")
    ] = None
    zoo: Annotated[
        Path, Field(description="folder whose bundles are served when none is named")
    ] = _PROJECT / "zoo"
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="most threads of a runtime call (default: every core)"),
    ] = None
    device: Annotated[
        Device, Field(description="what runs the graphs: cpu, or cuda or tensorrt of onnxruntime")
    ] = "cpu"
    allow_cpu_fallback: Annotated[
        bool, Field(description="run on the CPU where the device cannot be used, and say so")
    ] = False
    engines: Annotated[
        Path | None,
        Field(description="native TensorRT engines to run: a folder, or one of a folder a model"),
    ] = None
    engine_nice: Annotated[
        int,
        Field(
            ge=0,
            le=19,
            description="how much nicer threads that compute are than the one that answers; "
            "elsewhere than in a container all other programs go before them too",
        ),
    ] = 0
    queue_limit: Annotated[
        int, Field(ge=1, le=1_000_000, description="requests that may wait before 429")
    ] = 256
    queue_wait_s: Annotated[
        float,
        Field(
            gt=0,
            le=86400,
            description="predicted wait of the queue before 429; requests whose deadline will be "
            "met are taken all the same",
        ),
    ] = 60.0
    degrade: Annotated[
        bool,
        Field(description="give requests that name no exact steps fewer while much waits"),
    ] = True
    degrade_wait_ms: Annotated[
        float, Field(gt=0, le=86_400_000, description="predicted wait at which steps fall")
    ] = 500.0
    recheck_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="share of the answers under max_disagreement that are compared with those "
            "of all steps, in idle time",
        ),
    ] = 0.02
    batch_rows: Annotated[
        int, Field(ge=1, le=4096, description="rows in one classification call")
    ] = 16
    batch_tokens: Annotated[
        int,
        Field(
            ge=1, le=100_000_000, description="rows times the longest, in one classification call"
        ),
    ] = 8192
    decode_rows: Annotated[
        int,
        Field(ge=1, le=4096, description="generations that decode together, per model and steps"),
    ] = 16
    max_wait_ms: Annotated[
        float,
        Field(ge=0, le=10_000, description="how long a classification may wait to share a call"),
    ] = 0.0
    cache_mb: Annotated[
        int, Field(ge=1, le=1_000_000, description="MiB of memory for the caches of generations")
    ] = 128
    api_keys_file: Annotated[
        Path | None,
        Field(
            description="TOML file of API keys, made with --make-key; with it, or with "
            f"{KEYS_VARIABLE}, every route but the probes needs a key"
        ),
    ] = None
    admin_keys_file: Annotated[
        Path | None,
        Field(
            description="TOML file of keys, made with --make-key, for those who may load and "
            f"unload models; without it and {ADMIN_KEY_VARIABLE} nobody may"
        ),
    ] = None
    admin_folders: Annotated[
        tuple[Path, ...],
        NoDecode,
        Field(
            description="folders that models may be loaded from while the server runs, separated "
            "by commas (default: those served at the start, and the zoo)"
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(
            description="web pages of other addresses that may call, such as "
            "https://app.example.org; several are separated by commas"
        ),
    ] = ()
    max_connections: Annotated[
        int,
        Field(
            ge=1,
            le=100_000,
            description="connections that may be open; for one more, that which has been idle "
            "longest is closed, or 503 where none is idle",
        ),
    ] = 1000
    max_address_connections: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="connections that one client address may have (default: half of all); "
            "trusted proxies may have all",
        ),
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(
            description="addresses or networks of proxies, each of which stands for many clients, "
            "such as 10.0.0.0/8; several are separated by commas"
        ),
    ] = ("127.0.0.0/8", "::1/128")
    max_headers: Annotated[
        int, Field(ge=8, le=10_000, description="headers that a request may have before 431")
    ] = 100
    max_header_bytes: Annotated[
        int,
        Field(ge=1024, le=2**24, description="size of all headers before 431, of a URL before 414"),
    ] = 2**15
    header_timeout_s: Annotated[
        float, Field(gt=0, le=3600, description="time for the headers to arrive before 408")
    ] = 10.0
    send_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="time that a client may leave what was sent unread before the connection "
            "is cut",
        ),
    ] = 60.0
    max_body_bytes: Annotated[
        int, Field(ge=1024, le=2**30, description="size of a request body before 413")
    ] = 2**20
    body_timeout_s: Annotated[
        float, Field(gt=0, le=3600, description="time for a request body to arrive before 408")
    ] = 30.0
    max_tokens: Annotated[
        int, Field(ge=1, le=1_000_000, description="the most max_tokens that a request may ask for")
    ] = 4096
    max_answer_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000_000,
            description="the most tokens in one answer of several texts, or with logprobs, which "
            "are included: texts x max_tokens x (1 + logprobs)",
        ),
    ] = 2**17
    max_inputs: Annotated[
        int, Field(ge=1, le=64, description="the most inputs in one classify request")
    ] = 64
    drain_s: Annotated[
        float, Field(ge=0, le=3600, description="time for running requests to finish on SIGTERM")
    ] = 30.0
    stall_s: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="shortest time after which a model call counts as stuck; it must also have "
            "taken 10 times as long as usual. It is cancelled, and readiness turns off",
        ),
    ] = 1.5
    stall_unknown_s: Annotated[
        float,
        Field(gt=0, le=3600, description="the same for calls whose usual time is unknown"),
    ] = 10.0
    stall_exit_s: Annotated[
        float,
        Field(gt=0, le=3600, description="time for such a call to end before the process does"),
    ] = 5.0
    access_log: Annotated[bool, Field(description="log every request")] = False
    log_format: Annotated[
        LogFormat, Field(description="lines of text, or one JSON object a line")
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="what to log")
    ] = "warning"

    @field_validator("host", "health_host")
    @classmethod
    def _named_host(cls, host: str | None) -> str | None:
        if host is not None and not host.strip():
            raise ValueError("name an address, such as 127.0.0.1 or 0.0.0.0")
        return host

    @field_validator("health_port")
    @classmethod
    def _port_of_its_own(cls, port: int | None, info: ValidationInfo) -> int | None:
        if port and port == info.data.get("port"):
            raise ValueError("that is --port: give it one of its own")
        return port

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ip_network(network)
        return networks

    @field_validator("cors_origins", "admin_folders", "trusted_proxies", mode="before")
    @classmethod
    def _separated(cls, several: object) -> object:
        if isinstance(several, str):
            return tuple(word.strip() for word in several.split(",") if word.strip())
        return several

    @field_validator("cors_origins")
    @classmethod
    def _exact_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: send scheme://host or scheme://host:port in lower "
                    "case, without a path; * is not taken, since it would let every page in"
                )
        return origins

    @property
    def place(self) -> Place:
        """The part that concerns the runtime."""
        return Place(self.device, self.allow_cpu_fallback, self.engines)

    @property
    def patience(self) -> Patience:
        """The part that concerns calls that hang."""
        return Patience(self.stall_s, self.stall_unknown_s, self.stall_exit_s)

    @property
    def limits(self) -> Limits:
        """The part that concerns the scheduler."""
        return Limits(
            queue_requests=self.queue_limit,
            batch_rows=self.batch_rows,
            batch_tokens=self.batch_tokens,
            decode_rows=self.decode_rows,
            cache_bytes=self.cache_mb * 2**20,
            max_wait_s=self.max_wait_ms / 1000,
            queue_wait_s=self.queue_wait_s,
            degrade_wait_s=self.degrade_wait_ms / 1000 if self.degrade else None,
        )

    @classmethod
    def read(
        cls,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Settings from flags, then the environment, then a file, then defaults.

        SettingsError where one of them is unusable.
        """
        environ, flags = os.environ if environ is None else environ, flags or {}
        check_names(environ, cls.model_fields)
        upper = {name.upper() for name in environ}
        filed = {
            field: value
            for field, value in (config or {}).items()
            if field not in flags and variable(field) not in upper
        }
        try:
            return cls(**filed, **flags)
        except ValidationError as error:
            raise SettingsError(_explain(error, flags, filed)) from None


def _explain(error: ValidationError, flags: Mapping[str, Any], filed: Mapping[str, Any]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        field = str(problem["loc"][0])
        name = flag(field) if field in flags else variable(field)
        if field in filed:
            name = f"{field} of the settings file"
        why = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name} is {problem['input']!r}: {why}")
    return "; ".join(lines)


# The command line of `stepdial serve`, made from the settings.


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was typed: folders of bundles, and the settings that have a flag."""

    bundles: tuple[Path, ...]
    flags: dict[str, Any]
    config: Path | None = None  # the file of settings
    new_key: str | None = None  # the name of a key to make instead of serving


def parse(argv: Sequence[str]) -> CommandLine:
    """Read the command line; unknown flags end the process with status 2, as usual."""
    parser = _parser()
    known, unknown = parser.parse_known_args(list(argv))
    options = vars(known)
    if unknown:
        parser.error(_unknown_text(unknown, options))
    bundles, new_key = tuple(options.pop("bundles")), options.pop("make_key")
    config = options.pop("config") or os.environ.get(CONFIG_VARIABLE)
    return CommandLine(
        bundles,
        {name: text for name, text in options.items() if text is not None},
        None if config is None else Path(config),
        new_key,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepdial serve",
        description="Answer HTTP requests with the models of these bundles; without one, with "
        "every bundle of the zoo.",
        epilog="Every setting has an environment variable, named in brackets, and may stand in "
        "the file that --config names, without dashes. Flags come before the environment, that "
        "before the file. Other variables: "
        + "; ".join(f"{name}: {about}" for name, about in OTHER_VARIABLES.items())
        + ".",
        allow_abbrev=False,
    )
    parser.add_argument(
        "bundles", nargs="*", type=Path, metavar="BUNDLE", help="folder of a bundle to serve"
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"read settings from this TOML file [{CONFIG_VARIABLE}]"
    )
    parser.add_argument(
        "--make-key",
        metavar="NAME",
        help="show a new API key of this name, write what --api-keys-file needs to know of it to "
        "standard output, and end",
    )
    for name, field in Settings.model_fields.items():
        about = f"{field.description} [{variable(name)}]"
        if field.default not in (None, ()) and name != "zoo":
            about += f" (default: {field.default})"
        about = about.replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                flag(name), action=argparse.BooleanOptionalAction, default=None, help=about
            )
        else:
            # Text as it is: the settings know what it may be, and say so.
            parser.add_argument(flag(name), default=None, metavar=_metavar(name), help=about)
    return parser


def _unknown_text(unknown: Sequence[str], options: Collection[str]) -> str:
    """What argparse says, and what misspelt flags were probably meant to be."""
    fields = Settings.model_fields.items()
    switches = [f"no_{name}" for name, field in fields if field.annotation is bool]
    # Without the dashes, which would make short names more alike than they are.
    names = [flag(name).removeprefix("--") for name in (*options, *switches) if name != "bundles"]
    typed = [word[2:].partition("=")[0] for word in unknown if word.startswith("--")]
    meant = [f"--{close}" for close in (nearest(word, names) for word in typed) if close]
    hint = f"; did you mean {' and '.join(meant)}?" if meant else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


def _metavar(name: str) -> str:
    unit = name.rpartition("_")[2]
    return {"s": "SECONDS", "ms": "MS", "mb": "MIB", "bytes": "BYTES", "zoo": "FOLDER"}.get(
        unit, unit.upper()
    )


# The settings file: TOML, one key a setting, named as the setting is.


def read_config(path: Path) -> dict[str, Any]:
    """What the file sets; SettingsError where it cannot be read or sets what is no setting."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings in {path}: {error.strerror}") from None
    except ValueError as error:  # neither UTF-8 nor TOML
        raise SettingsError(f"the settings in {path} are not TOML: {error}") from None
    for name in given:
        if name not in Settings.model_fields:
            close = nearest(name, Settings.model_fields)
            hint = f"did you mean {close}?" if close else "see docs/settings.md for those there are"
            raise SettingsError(f"{name!r} in {path} is no setting: {hint}")
    return given
