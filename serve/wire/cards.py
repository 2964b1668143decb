"""What clients learn of the models: their cards and their ladders, every field documented.

Knows shapes only; the routes fill them.
"""

from typing import Any, Literal

from pydantic import Field

from serve.bundle import Cache, Depth, Dial, Effort, Method, Metric, Task
from serve.wire.answers import METRIC, Answer

_DIAL = (
    "What `steps` turn: `resolution`, as all steps cross the same depth, more of them more finely; "
    "or `time`, as each step is of one size, so that fewer steps end earlier."
)
_GRID = "With the dial `time`, the steps that the model was trained with; null otherwise."
_DEPTH = (
    "`ode`: one set of weights for every number of steps; `chain`: one ODE for each block; "
    "`fixed`: weights that differ by depth, so that there is one rung."
)


class TakesText(Answer):
    """A model of texts."""

    kind: Literal["text"] = Field(description="Always `text`.")
    max_tokens: int = Field(description="The most tokens.")


class TakesImage(Answer):
    """A model of images."""

    kind: Literal["image"] = Field(description="Always `image`.")
    channels: int = Field(description="1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.")
    height: int = Field(description="Rows that an image is resized to.")
    width: int = Field(description="Pixels a row that an image is resized to.")


class TakesPoints(Answer):
    """A model of clouds of points."""

    kind: Literal["points"] = Field(description="Always `points`.")
    max_points: int = Field(description="The most points of a cloud.")
    dimensions: int = Field(description="Numbers that each point has.")


class Interval(Answer):
    """A measured quality with its confidence interval."""

    value: float = Field(description="Measured on held-out data.")
    low: float = Field(description="Lower end of the interval.")
    high: float = Field(description="Upper end of the interval.")
    samples: int = Field(description="How many samples were measured.")
    exact: float | None = Field(
        None,
        description="Of a model that labels each token: the share of texts without a wrong label.",
    )


class LadderRung(Answer):
    """One operating point."""

    steps: int = Field(description="What to send as `steps`.")
    method: Method = Field(description="How a step uses the velocity.")
    nfe: int = Field(description="Velocity evaluations: the true cost.")
    effort: Effort | None = Field(description="What to send as `effort`, if the rung has a name.")
    quality: Interval = Field(description="On held-out data, in the metric of the ladder.")
    latency_ms: float | None = Field(
        description="Measured when the bundle was made: one input of the greatest length "
        "(classify), or one token after it (generate). Null if it was not measured."
    )
    predicted_ms: float | None = Field(
        description="The same as this server would do it now, waiting included. Null while "
        "nothing is known."
    )


class LadderResponse(Answer):
    """All operating points of a model."""

    model: str = Field(description="Name of the model.")
    task: Task = Field(description="What the model does.")
    depth: Depth = Field(description=_DEPTH)
    dial: Dial = Field(description=_DIAL)
    grid_steps: int | None = Field(description=_GRID)
    input: TakesText | TakesImage | TakesPoints = Field(description="What the model takes.")
    metric: Metric = Field(description=METRIC)
    full_steps: int = Field(description="The most steps there are.")
    default_steps: int = Field(description="What a request without a budget gets.")
    caution: float = Field(
        description="A deadline_ms has room for predicted_ms times this, since some calls take "
        "longer; a generation's for that of all its tokens."
    )
    answer_ms: float = Field(
        description="And for this beside it: until an answer has left, once its last call is over."
    )
    rungs: list[LadderRung] = Field(description="By steps, ascending.")


class ModelCard(Answer):
    """A model that is served."""

    id: str = Field(description="What to send as `model`.")
    object: Literal["model"] = Field(default="model", description="Always `model`.")
    created: int = Field(description="When this server loaded it, in Unix seconds.")
    ready: bool = Field(
        description="Whether requests of it are welcome: its last call did not fail, no call "
        "hangs, and the server is not shutting down."
    )
    owned_by: Literal["stepdial"] = Field(default="stepdial", description="Always `stepdial`.")
    task: Task = Field(
        description="`classify` and `tag` (a label for each token) are answered by /v1/classify, "
        "`generate` and `translate` by /v1/generate."
    )
    depth: Depth = Field(description=_DEPTH)
    dial: Dial = Field(description=_DIAL)
    grid_steps: int | None = Field(description=_GRID)
    input: TakesText | TakesImage | TakesPoints = Field(description="What the model takes.")
    method: Method = Field(description="How a step uses the velocity.")
    steps: list[int] = Field(description="What `steps` may be.")
    efforts: dict[str, int] = Field(description="What `effort` may be, and the steps it means.")
    default_steps: int = Field(description="What a request without a budget gets.")
    full_steps: int = Field(description="The most steps there are.")
    max_disagreement: list[float] = Field(
        description="The levels of max_disagreement at which answers come early; none where the "
        "model was not calibrated for it."
    )
    traces: bool = Field(description="Whether /v1/classify takes `trace` for this model here.")
    metric: Metric = Field(description="What the quality of a rung is measured in.")
    labels: list[str] | None = Field(
        description="What a classifier or tagger answers; null for generators."
    )
    max_tokens: int | None = Field(
        description="Tokens that the model sees at once; of a translator, tokens of the text to "
        "translate. Null for images and points."
    )
    target_max_tokens: int | None = Field(
        description="The most tokens of a translation; null for other tasks."
    )
    parameters: int = Field(description="Number of weights.")
    precision: str = Field(description="Of the weights.")
    cache: Cache = Field(
        description="How keys and values are kept while text is written: as float numbers (`kv`) "
        "or as bytes (`kv_int8`); `none` where no text is."
    )
    card: dict[str, Any] = Field(description="What its makers say of it.")


class ModelList(Answer):
    """All models that are served."""

    object: Literal["list"] = Field(default="list", description="Always `list`.")
    data: list[ModelCard] = Field(description="In the order in which they were loaded.")
