"""Settings of the server: each is a flag, an environment variable and a key of the settings file.

The flags of `stepdial serve` are made from the class `Settings`. Unknown names fail at start.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from serve.engine.job import Limits
from serve.logs import LogFormat
from stepdial import Options, nearest

if TYPE_CHECKING:  # these take long to load, and --help needs none of them
    from serve.engine.engine import StallLimits
    from serve.runtime.protocol import Device

# Names of settings as flags and as environment variables.


PREFIX = "STEPDIAL_"
CONFIG_VARIABLE = "STEPDIAL_CONFIG"
KEYS_VARIABLE = "STEPDIAL_API_KEYS"
ADMIN_KEY_VARIABLE = "STEPDIAL_ADMIN_KEY"
# Variables without a flag: the file of settings, and secrets, which a command line would show.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "TOML file of settings, the same as --config",
    KEYS_VARIABLE: "API keys, separated by commas; a file of keys holds only digests",
    ADMIN_KEY_VARIABLE: "admin keys, separated by commas; they may load and unload models",
}
# Variables that only the tests read.
_OF_TESTS = {
    "STEPDIAL_CHROMIUM",  # the browser for the page
    "STEPDIAL_HOSTILE_EXAMPLES",  # how many bodies to generate
    "STEPDIAL_MINILM",  # the folder of a pretrained model
    "STEPDIAL_OIP_DESCRIPTION",  # of the Open Inference Protocol
}
_NOT_SETTINGS = frozenset({*OTHER_VARIABLES, *_OF_TESTS})

# Variables that Kubernetes sets in every pod beside a Service named stepdial.
_OF_KUBERNETES = re.compile(r"STEPDIAL_(SERVICE_(HOST|PORT(_.*)?)|PORT_[0-9]+_.*)")


class SettingsError(ValueError):
    """A setting that cannot be used. The message names it and says what is allowed."""


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + field.upper()


def flag(field: str) -> str:
    """The command-line flag of a setting."""
    return "--" + field.replace("_", "-")


def check_names(environ: Mapping[str, str], settings: Collection[str]) -> None:
    """Refuse unknown STEPDIAL_ variables: a misspelt one would silently do nothing."""
    known = {variable(field) for field in settings} | _NOT_SETTINGS
    # Compared without the prefix, which would make any two names alike.
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

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(default=8000, ge=0, le=65535)
    """port to listen on; 0 takes a free one"""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """second port that answers only /metrics, /health and what is below it, and /v2/health/live
    and /v2/health/ready, with connection limits of its own, so that clients cannot crowd out
    probes; 0 takes a free one"""
    health_host: str | None = None
    """address of --health-port (default: the one of --host)"""
    zoo: Path = _PROJECT / "zoo"
    """folder whose bundles are served when none is named on the command line"""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """threads that one model call may use, at most (default: every core)"""
    device: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    """where models run: cpu, or onnxruntime's cuda or tensorrt"""
    device_number: int = Field(default=0, ge=0, le=255)
    """which GPU, as the driver numbers them"""
    device_memory_mb: int | None = Field(default=None, ge=1, le=1 << 24)
    """most memory of the GPU that each graph may take for weights and work; `cache_mb` bounds KV
    caches (default: all there is)"""
    allow_cpu_fallback: bool = False
    """if the device cannot be used, run on the CPU and log a warning"""
    engines: Path | None = None
    """native TensorRT engines to run instead of the graphs: a folder of engines, or a folder with
    one such folder per model"""
    engine_nice: int = Field(default=0, ge=0, le=19)
    """niceness added to the threads that run models, so that the thread that answers HTTP goes
    first; outside a container every other program on the machine goes before them too"""
    queue_limit: int = Field(default=256, ge=1, le=1_000_000)
    """queue length: requests that may wait before the next one gets 429"""
    queue_wait_s: float = Field(default=60.0, gt=0, le=86400)
    """longest predicted wait in the queue: beyond it a request gets 429, unless it has a deadline
    that can be met"""
    degrade: bool = True
    """under load, give fewer steps to requests that set no steps, effort or max_disagreement"""
    degrade_wait_ms: float = Field(default=500.0, gt=0, le=86_400_000)
    """predicted wait in the queue from which on --degrade lowers steps"""
    recheck_share: float = Field(default=0.02, ge=0, le=1)
    """share of max_disagreement answers that are computed again with all steps while the server is
    idle, to measure how often they differ"""
    batch_rows: int = Field(default=16, ge=1, le=4096)
    """rows in one classification batch, at most"""
    batch_tokens: int = Field(default=8192, ge=1, le=100_000_000)
    """tokens in one classification batch, at most: rows x the longest row"""
    decode_rows: int = Field(default=16, ge=1, le=4096)
    """generations decoded in one batch, at most, per model and step count"""
    max_wait_ms: float = Field(default=0.0, ge=0, le=10_000)
    """how long a classification may wait for others to share its batch"""
    cache_mb: int = Field(default=128, ge=1, le=1_000_000)
    """memory for the KV caches of all generations, in MiB"""
    api_keys_file: Path | None = None
    """TOML file of API keys, made with --make-key. With this file, or with STEPDIAL_API_KEYS,
    every route except the health probes needs a key"""
    admin_keys_file: Path | None = None
    """TOML file of admin keys, made with --make-key, which may load and unload models. Without
    this file and without STEPDIAL_ADMIN_KEY those routes are off"""
    admin_folders: Annotated[tuple[Path, ...], NoDecode] = ()
    """folders from which models may be loaded while the server runs, separated by commas (default:
    the folders served at start, and the zoo)"""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """origins of other web pages that may call this server (CORS), such as
    https://app.example.org, separated by commas"""
    max_connections: int = Field(default=1000, ge=1, le=100_000)
    """open connections, at most. One more closes the connection that has been idle longest, or
    gets 503 if none is idle"""
    max_address_connections: int | None = Field(default=None, ge=1, le=100_000)
    """open connections per client address, at most (default: half of --max-connections); trusted
    proxies are exempt"""
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ("127.0.0.0/8", "::1/128")
    """addresses or networks of proxies that forward many clients, such as 10.0.0.0/8, separated by
    commas; --max-address-connections does not apply to them"""
    max_headers: int = Field(default=100, ge=8, le=10_000)
    """headers per request, at most; more get 431"""
    max_header_bytes: int = Field(default=2**15, ge=1024, le=2**24)
    """size of all headers of a request, at most: more get 431, a longer URL gets 414"""
    header_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """time in which the headers must arrive; after it the client gets 408"""
    send_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """time in which a client must read what was sent to it; after it the connection is closed"""
    max_body_bytes: int = Field(default=2**20, ge=1024, le=2**30)
    """size of a request body, at most; more gets 413"""
    body_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """time in which a request body must arrive; after it the client gets 408"""
    max_tokens: int = Field(default=4096, ge=1, le=1_000_000)
    """largest max_tokens that a request may send"""
    max_answer_tokens: int = Field(default=2**17, ge=1, le=1_000_000_000)
    """tokens in one answer, at most, if it has several texts or logprobs: texts x max_tokens x (1
    + logprobs)"""
    max_inputs: int = Field(default=64, ge=1, le=64)
    """inputs in one classify request, at most"""
    drain_s: float = Field(default=30.0, ge=0, le=3600)
    """on SIGTERM, time for running requests to finish"""
    stall_s: float = Field(default=1.5, gt=0, le=3600)
    """shortest time after which a model call counts as stuck; it must also have taken 10 times as
    long as usual. A stuck call is cancelled, and /health/ready fails until it has ended"""
    stall_unknown_s: float = Field(default=10.0, gt=0, le=3600)
    """time after which a model call counts as stuck while its usual time is not known yet"""
    stall_exit_s: float = Field(default=5.0, gt=0, le=3600)
    """time that a stuck call has to end after it was cancelled; then the process exits, so that it
    can be restarted"""
    access_log: bool = False
    """write a log line for every request"""
    log_format: LogFormat = "text"
    """log format: text lines, or one JSON object per line"""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """lowest level that is logged"""

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

    @field_validator("batch_rows", "decode_rows")
    @classmethod
    def _rows_of_its_engines(cls, rows: int, info: ValidationInfo) -> int:
        if info.data.get("device") == "tensorrt" and info.data.get("engines") is None:
            from serve.runtime.session import DEFAULT_ROWS

            if rows > DEFAULT_ROWS:
                raise ValueError(f"--device tensorrt takes at most {DEFAULT_ROWS} rows a call")
        return rows

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
    def runs_on(self) -> "Device":
        """The device settings, for the runtime."""
        from serve.runtime.protocol import Device

        return Device(
            self.device,
            self.allow_cpu_fallback,
            self.engines,
            self.device_number,
            self.device_memory_mb,
        )

    @property
    def patience(self) -> "StallLimits":
        """The limits for stuck calls, for the watchdog."""
        from serve.engine.engine import StallLimits

        return StallLimits(self.stall_s, self.stall_unknown_s, self.stall_exit_s)

    @property
    def limits(self) -> Limits:
        """The limits of queue, batches and cache."""
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
        """Settings from flags, else the environment, else a file, else defaults.

        SettingsError if one of them cannot be used.
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


def meaning(field: FieldInfo) -> str:
    """What a setting is for, in one line."""
    return " ".join(str(field.description).split())


def default_in_words(field: FieldInfo) -> str:
    """The default of a setting as one would write it, empty if there is none."""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return ",".join(field.default)
    return "" if field.default is None else str(field.default)


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


# The command line, made from the settings.


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The parsed command line: bundle folders, and the settings that were given as flags."""

    bundles: tuple[Path, ...]
    flags: dict[str, Any]
    config: Path | None = None  # the file of settings
    new_key: str | None = None  # the name of a key to make instead of serving


def parse(argv: Sequence[str]) -> CommandLine:
    """Parse the command line. Unknown flags end the process with status 2."""
    options = vars(_parser().parse_args(list(argv)))
    bundles, new_key = tuple(options.pop("bundles")), options.pop("make_key")
    config = options.pop("config") or os.environ.get(CONFIG_VARIABLE)
    return CommandLine(
        bundles,
        {name: text for name, text in options.items() if text is not None},
        None if config is None else Path(config),
        new_key,
    )


def _parser() -> Options:
    parser = Options(
        prog="stepdial serve",
        description="Serve the models of these bundles over HTTP. Without a bundle, every "
        "bundle of the zoo is served.",
        epilog="Every setting can be given as a flag, as the environment variable named in "
        "brackets, or as a key of the --config file, named like the flag without the "
        "leading dashes and with underscores. Flags win over the environment, the "
        "environment over the file. Other variables: "
        + "; ".join(f"{name}: {about}" for name, about in OTHER_VARIABLES.items())
        + ".",
        allow_abbrev=False,
    )
    parser.add_argument(
        "bundles", nargs="*", type=Path, metavar="BUNDLE", help="bundle folder to serve"
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"read settings from this TOML file [{CONFIG_VARIABLE}]"
    )
    parser.add_argument(
        "--make-key",
        metavar="NAME",
        help="make a new API key of this name: print the key to the terminal and the entry for "
        "--api-keys-file to standard output, then exit",
    )
    for name, field in Settings.model_fields.items():
        about = f"{meaning(field)} [{variable(name)}]"
        default = default_in_words(field)
        if default and name != "zoo":
            about += f" (default: {default})"
        about = about.replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                flag(name), action=argparse.BooleanOptionalAction, default=None, help=about
            )
        else:
            # Kept as text: `Settings` parses it and explains what is wrong.
            parser.add_argument(flag(name), default=None, metavar=_metavar(name), help=about)
    return parser


def _metavar(name: str) -> str:
    unit = name.rpartition("_")[2]
    return {"s": "SECONDS", "ms": "MS", "mb": "MIB", "bytes": "BYTES", "zoo": "FOLDER"}.get(
        unit, unit.upper()
    )


# The settings file: TOML, one key per setting.


def read_config(path: Path) -> dict[str, Any]:
    """The settings in the file; SettingsError if it cannot be read or has an unknown key."""
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
        if isinstance(given[name], bool) and Settings.model_fields[name].annotation is not bool:
            raise SettingsError(f"{name} in {path} takes a value, not true or false")
    return given
