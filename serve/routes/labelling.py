"""From inputs that were read to their labels, whatever protocol sent them.

Knows how rows run; deliberately neither how requests ask nor how answers look.
"""

from collections.abc import Sequence

from starlette.requests import Request

from serve.budget import Decision
from serve.bundle import Manifest
from serve.catalog import Served
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, Event, FailedEvent, Job, LaneKey, Tags
from serve.engine.work import Classification, Work
from serve.inputs.rows import Intake, greatest_length, row_length
from serve.routes.shared import deadline_of, note_decision
from serve.wire.answers import TokenLabel
from serve.wire.mailbox import Mailbox, Submitted
from serve.wire.schemas import BudgetFields


def refuse_early(
    request: Request,
    engine: Engine,
    served: Served,
    asked: BudgetFields,
    decision: Decision,
    rows: int,
) -> None:
    """Raise if so many rows cannot be labelled in time, whatever is in them: none is read."""
    deadline = deadline_of(request, asked)
    if deadline is not None:
        least = decision.choices[0].steps if decision.choices else decision.steps
        lengths = (greatest_length(served.manifest),) * rows
        engine.check_early(_lane(served, decision), least, lengths, deadline)


async def labelled(
    request: Request,
    engine: Engine,
    served: Served,
    asked: BudgetFields,
    decision: Decision,
    taken: Sequence[Intake],
    traced: bool = False,
) -> ClassifiedEvent:
    """The labels of these rows; raises what kept them from being answered."""
    manifest = served.manifest
    mailbox: Mailbox[Event] = Mailbox()
    rows = [one.row for one in taken]
    job: Job[Work] = Job(
        lane=_lane(served, decision)._replace(traced=traced),
        work=Classification(rows, mailbox.deliver),
        lengths=tuple(row_length(row, manifest) for row in rows),
        may_pad=manifest.input.kind == "text",
        deadline=deadline_of(request, asked),
        choices=decision.step_choices,
    )
    with Submitted(engine, (job,), mailbox, request):
        event = (await mailbox.take())[0]
    if isinstance(event, FailedEvent):
        raise event.error
    assert isinstance(event, ClassifiedEvent)
    note_decision(request, engine, served, decision.served_at(min(event.steps)))
    return event


def ranked(scores: Sequence[float]) -> list[int]:
    """The numbers of the labels, likeliest first."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


def token_labels(tags: Tags, one: Intake, manifest: Manifest) -> list[TokenLabel]:
    """What the tokens label, with the labels; those inside a word label nothing."""
    labels = manifest.labels or ()
    return [
        {
            "text": one.text[start:end],
            "start": start,
            "end": end,
            "label": labels[label],
            "score": score,
        }
        for (start, end), label, score in zip(one.spans, tags.labels, tags.scores, strict=True)
        if start < end
    ]


def filled(tags: Tags, one: Intake, manifest: Manifest) -> str:
    """The text with the label of each character in its place."""
    labels, text = manifest.labels or (), list(one.text)
    for (start, _), label in zip(one.spans, tags.labels, strict=True):
        text[start] = labels[label]
    return "".join(text)


def _lane(served: Served, decision: Decision) -> LaneKey:
    """Rows of exact steps have a lane of their own; others share one, whatever they get."""
    if decision.choices:
        return LaneKey(served.key, "classify", served.manifest.full_steps, late=True)
    return LaneKey(served.key, "classify", decision.steps, decision.threshold)
