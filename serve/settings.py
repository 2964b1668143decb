"""Settings of the server: every one has a flag, an environment variable, a key of the settings
file, a default and a limit.

The flags of `stepdial serve` are made from this class, and misspelt names fail at start. It
deliberately knows nothing of what uses a setting.
"""

import os
import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from serve.engine.job import Limits
from serve.engine.watchdog import Patience
from serve.logs import LogFormat
from serve.runtime.protocol import Device, Place
from serve.setting_names import (
    ADMIN_KEY_VARIABLE,
    KEYS_VARIABLE,
    PREFIX,
    SettingsError,
    check_names,
    flag,
    variable,
)

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
            description="predicted wait of the queue before 429, but for deadlines that are met",
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
            description="the least time after which a runtime call, if it has also taken 10 times "
            "as long as usual, is asked to end and /health/ready fails",
        ),
    ] = 1.5
    stall_unknown_s: Annotated[
        float,
        Field(gt=0, le=3600, description="the same while nobody knows how long it usually takes"),
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
