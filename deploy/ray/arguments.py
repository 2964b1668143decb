"""What a deployment on Ray is told: the `args` of its Serve config.

Settings of the server itself stay where they are, under `settings`. Knows names and limits;
deliberately nothing of Ray.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.ray.shelf import card_of
from serve.catalog import Catalog, Served, find_bundles, read_servable
from serve.settings import Settings


class Arguments(BaseModel):
    """How to deploy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bundles: Annotated[
        tuple[Path, ...],
        Field(description="folders of bundles, the same on every node; none: those of the zoo"),
    ] = ()
    settings: Annotated[
        Mapping[str, Any], Field(description="settings of the server, as in its settings file")
    ] = Field(default_factory=dict)
    models_per_replica: Annotated[
        int, Field(ge=1, le=1000, description="models that a replica holds before one must leave")
    ] = 3
    preload: Annotated[
        bool, Field(description="load the first models before a replica takes requests")
    ] = True
    cpus: Annotated[float, Field(gt=0, le=1024, description="cores of a replica")] = 1.0
    gpus: Annotated[float, Field(ge=0, le=64, description="GPUs of a replica")] = 0.0
    min_replicas: Annotated[int, Field(ge=1, le=1000, description="replicas when idle")] = 1
    max_replicas: Annotated[int, Field(ge=1, le=1000, description="replicas at most")] = 4
    queue_depth: Annotated[
        float, Field(gt=0, description="requests that wait on a replica before there is another")
    ] = 4.0
    attainment: Annotated[
        float, Field(gt=0, le=1, description="share of deadlines to meet before there is another")
    ] = 0.999
    busy: Annotated[
        float, Field(gt=0, le=1, description="busy share that one replica fewer may come to")
    ] = 0.7
    scale_up_s: Annotated[
        float, Field(ge=0, le=3600, description="time that more must be wanted for")
    ] = 5.0
    scale_down_s: Annotated[
        float, Field(ge=0, le=86400, description="time that fewer must be wanted for")
    ] = 300.0
    spill_requests: Annotated[
        float,
        Field(
            ge=0,
            description="requests by which a replica with the model may be busier than one without",
        ),
    ] = 4.0
    fronts: Annotated[int, Field(ge=1, le=100, description="processes that take HTTP")] = 1
    front_resource: Annotated[
        str, Field(min_length=1, description="Ray resource of the nodes that take HTTP")
    ] = "node:__internal_head__"
    host: Annotated[str, Field(min_length=1, description="address that fronts listen on")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int | None,
        Field(ge=1, le=65535, description="port that fronts listen on; none: Serve's proxy does"),
    ] = None
    replica_host: Annotated[
        str, Field(description="address of the port that Serve opens in each replica; none: node's")
    ] = ""
    first_answer_s: Annotated[
        float, Field(gt=0, le=86400, description="time for an answer to begin before 503")
    ] = 120.0

    @model_validator(mode="after")
    def _usable(self) -> "Arguments":
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must be at least min_replicas")
        if "admin_keys_file" in self.settings:
            raise ValueError(
                "admin_keys_file means nothing on Ray: replicas load what is asked for; to change "
                "the bundles, change the config and deploy it again"
            )
        return self

    def read_settings(self) -> Settings:
        """The server's settings; a replica takes no more threads than it has cores."""
        settings = Settings.read(config=self.settings)
        if settings.threads is None:
            settings = settings.model_copy(update={"threads": max(1, int(self.cpus))})
        return settings

    def read_cards(self, settings: Settings) -> list[Served]:
        """The models as their manifests describe them, none of them open."""
        folders = self.bundles or find_bundles(settings.zoo)
        bundles = [read_servable(folder, settings.place, verify=False) for folder in folders]
        return [card_of(bundle) for bundle in bundles]


def catalog_of(cards: list[Served]) -> Catalog:
    """All models by name; ValueError where two have the same."""
    names = [card.name for card in cards]
    if len(set(names)) < len(names):
        raise ValueError(f"two bundles have the same name, of {', '.join(names)}: serve one")
    return Catalog(cards)
