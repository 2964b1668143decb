"""A budget as a caller asks for it: written in a mix, sent in a body, compared with an answer.

It deliberately knows nothing of models, so not which steps or efforts there are.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

EFFORTS = ("low", "medium", "high", "max")
SYNTAX = (
    "steps such as 4, * for every rung, low, medium, high or max, 50ms for a deadline, "
    "disagree0.01, min2 and max8 for limits, default for none, joined by +"
)
_DEADLINE = re.compile(r"([0-9.]+)ms")
_LIMIT = re.compile(r"(min|max)([0-9]+)")
_DISAGREE = "disagree"


@dataclass(frozen=True, slots=True)
class Ask:
    """The budget fields of one request; all None: the default of the model."""

    steps: int | None = None
    effort: str | None = None
    deadline_ms: float | None = None
    max_disagreement: float | None = None
    min_steps: int | None = None
    max_steps: int | None = None

    @property
    def fields(self) -> dict[str, int | float | str]:
        """What the body of a request says."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        words = (
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.fields.items()
        )
        return " ".join(words) or "default"

    @property
    def place(self) -> tuple[float, str]:
        """Where it stands in a table: fixed steps first, ascending."""
        return (float("inf") if self.steps is None else self.steps), str(self)

    def objection(self, steps: object) -> str | None:
        """What is wrong with an answer of so many steps; None if nothing is."""
        if self.steps is not None:
            wrong = steps != self.steps
        elif isinstance(steps, int):
            # With max_disagreement, an answer may come before the least of the steps.
            early = self.max_disagreement is not None
            low = 0 if early or self.min_steps is None else self.min_steps
            wrong = not low <= steps <= (self.max_steps or steps)
        else:
            wrong = True
        return f"asked for {self}, the answer says {steps} steps" if wrong else None


def parse_ask(text: str) -> Ask:
    """The budget that a text such as `50ms+max8` stands for; ValueError if it is none."""
    fields: dict[str, Any] = {}
    for word in text.split("+"):
        name, value = _parse_word(word)
        if name in fields:
            raise ValueError(f"{text!r} says {name} twice")
        if name:
            fields[name] = value
    if not fields and text != "default":
        raise ValueError(f"{text!r} is no budget: write {SYNTAX}")
    return Ask(**fields)


def _parse_word(word: str) -> tuple[str, int | float | str]:
    if word == "default":
        return "", ""
    if word in EFFORTS:
        return "effort", word
    if word.isdecimal():
        return "steps", int(word)
    if limit := _LIMIT.fullmatch(word):
        return f"{limit[1]}_steps", int(limit[2])
    try:
        if deadline := _DEADLINE.fullmatch(word):
            return "deadline_ms", float(deadline[1])
        if word.startswith(_DISAGREE):
            return "max_disagreement", float(word.removeprefix(_DISAGREE))
    except ValueError:
        pass
    raise ValueError(f"{word!r} is no budget: write {SYNTAX}")
