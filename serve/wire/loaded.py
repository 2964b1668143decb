"""What the admin routes take and give: which models are in the server, and what changed.

Knows shapes only; the routes fill them.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from serve.bundle import Task
from serve.catalog import Served
from serve.wire.answers import Answer


class LoadRequest(BaseModel):
    """A bundle to serve."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    bundle: str = Field(
        min_length=1,
        max_length=4096,
        description="Folder of the bundle, on the server, in one of the folders that it may load "
        "from. Its manifest says how the model is named.",
        examples=["/models/topics"],
    )


class LoadedModel(Answer):
    """A model in the server."""

    name: str = Field(description="What requests call it.")
    edition: int = Field(description="0 since the start; every later load has a number of its own.")
    task: Task = Field(description="What it does.")
    bundle: str = Field(description="The folder that it was loaded from.")
    loaded_at: int = Field(description="When it was loaded, in seconds since 1970.")
    state: Literal["serving", "leaving"] = Field(
        description="`leaving`: it gets no new requests, and is gone when its last one is answered."
    )
    requests: int = Field(description="Requests that are with it now.")

    @classmethod
    def of(cls, served: Served, state: Literal["serving", "leaving"]) -> Self:
        return cls(
            name=served.name,
            edition=served.edition,
            task=served.manifest.task,
            bundle=str(served.bundle.folder),
            loaded_at=int(served.loaded_at_s),
            state=state,
            requests=served.guests.count,
        )


class LoadedModels(Answer):
    """Every model in the server."""

    models: list[LoadedModel] = Field(description="Those that are served first.")


class LoadResponse(Answer):
    """What was loaded."""

    loaded: LoadedModel = Field(description="It answers every request from now on.")
    replaced: LoadedModel | None = Field(
        None, description="The model whose place it took, if there was one."
    )
    seconds: float = Field(description="From reading the bundle to serving it.")


class UnloadResponse(Answer):
    """What was unloaded."""

    unloaded: LoadedModel = Field(description="It gets no new requests.")
