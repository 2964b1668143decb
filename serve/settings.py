"""Settings of the server: every one has a flag, an environment variable, a default and a limit.

The flags of `stepdial serve` are made from this class, and misspelt names fail at start. It
deliberately knows nothing of what uses a setting.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from serve.engine.watchdog import Patience
from serve.runtime.place import Device, Place
from serve.scheduler.limits import Limits

PREFIX = "STEPDIAL_"
# Named like settings, but read by the tests: the browser that drives the page.
_NOT_SETTINGS = frozenset({"STEPDIAL_CHROMIUM"})
_PROJECT = Path(__file__).resolve().parent.parent


class SettingsError(ValueError):
    """A setting that cannot be used; the message says which, and what it may be."""


class Settings(BaseSettings):
    """How to serve."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="port to listen on; 0 takes a free one")
    ] = 8000
    zoo: Annotated[
        Path, Field(description="folder whose bundles are served when none is named")
    ] = _PROJECT / "zoo"
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="threads of a runtime call (default: every core)"),
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
    queue_limit: Annotated[
        int, Field(ge=1, le=1_000_000, description="requests that may wait before 429")
    ] = 256
    queue_wait_s: Annotated[
        float, Field(gt=0, le=86400, description="predicted wait of the queue before 429")
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
    max_body_bytes: Annotated[
        int, Field(ge=1024, le=2**30, description="size of a request body before 413")
    ] = 2**20
    body_timeout_s: Annotated[
        float, Field(gt=0, le=3600, description="time for a request body to arrive before 408")
    ] = 30.0
    max_tokens: Annotated[
        int, Field(ge=1, le=1_000_000, description="the most max_tokens that a request may ask for")
    ] = 4096
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
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="what to log")
    ] = "warning"

    @field_validator("host")
    @classmethod
    def _named_host(cls, host: str) -> str:
        if not host.strip():
            raise ValueError("name an address, such as 127.0.0.1 or 0.0.0.0")
        return host

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
        cls, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> Self:
        """Settings from flags, then the environment, then defaults; SettingsError if unusable."""
        check_names(os.environ if environ is None else environ)
        try:
            return cls(**(flags or {}))
        except ValidationError as error:
            raise SettingsError(_explain(error, flags or {})) from None


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + field.upper()


def flag(field: str) -> str:
    """The command-line flag of a setting."""
    return "--" + field.replace("_", "-")


def check_names(environ: Mapping[str, str]) -> None:
    """Refuse STEPDIAL_ variables that are no setting: a misspelt one would do nothing, silently."""
    known = {variable(field) for field in Settings.model_fields}
    for name in environ:
        if not name.upper().startswith(PREFIX) or name.upper() in known | _NOT_SETTINGS:
            continue
        # Without the prefix, which would make any two names alike.
        rest = name.upper().removeprefix(PREFIX)
        fields = [field.upper() for field in Settings.model_fields]
        close = difflib.get_close_matches(rest, fields, n=1)
        hint = (
            f"did you mean {PREFIX}{close[0]}?"
            if close
            else f"after {PREFIX} comes one of {', '.join(fields)}"
        )
        raise SettingsError(f"the environment variable {name} is no setting: {hint}")


def _explain(error: ValidationError, flags: Mapping[str, Any]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        field = str(problem["loc"][0])
        name = flag(field) if field in flags else variable(field)
        lines.append(f"{name} is {problem['input']!r}: {problem['msg']}")
    return "; ".join(lines)
