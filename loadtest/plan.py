"""The plan of a test: which requests it sends, in which order, and their outcomes so far."""

import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.arrivals import TraceError, parse_think_time, read_trace
from loadtest.mix import MixError, RoundRobin, resolve_mix
from loadtest.objective import ObjectiveError, parse_objective
from loadtest.outcomes import WARM_UP, Generator, Outcome, judge
from loadtest.report import Report, build_report
from loadtest.schedule import Schedule, Scheduler, Shot, Stage, Terms, parse_lengths
from loadtest.target import ENDPOINTS, Offer, TargetError, characters_per_token, read_key

# What the simulated callers say: prompts and texts to classify, in plain ASCII.


PROMPTS = (
    "Good morrow, my friend, ",
    "The king hath sent for thee, and ",
    "What news from the harbour?\n",
    "I pray you, tell me ",
    "First Citizen:\nWe have waited ",
    "O gentle night, ",
    "He that would ride at dawn must ",
    "My lord, the letter says ",
)

REVIEWS = (
    "A warm and patient film. The two leads are wonderful together, and the last scene stayed "
    "with me for days.",
    "I wanted to like it, but the story goes nowhere and the jokes were old before the titles "
    "had ended.",
    "Dull, loud and far too long.",
    "One of the best things I have seen this year; go and see it with somebody you love.",
    "The first hour promises a clever mystery. Then the plot gives up, the music swells, and "
    "everybody explains what we had already guessed. The actors do what they can with lines that "
    "no person would ever say, and the camera keeps looking away from the only interesting face "
    "in the room.",
)

HEADLINES = (
    "Central bank leaves interest rates alone as prices rise more slowly than expected",
    "Late goal sends the visitors to the top of the table after a bruising second half",
    "Ministers meet for a second day of talks on the border after a night of shelling",
    "New telescope finds water in the air of a small planet that circles a nearby star",
    "The maker of phone chips said on Monday that its profit had doubled in a year, and that a "
    "new factory would open in the spring.",
)

TEXTS = REVIEWS + HEADLINES


def lengthened(text: str, others: Sequence[str], turn: int, characters: int) -> str:
    """A text of so many characters: this one, then others, cut where it is long enough."""
    size = len(text)
    parts = [text]
    while size < characters:
        turn += 1
        parts.append(others[turn % len(others)])
        size += len(parts[-1]) + 1
    return " ".join(parts)[:characters]


# Prompts of the user's own: a file with one a line, as text or as JSON.


_KEYS = ("prompt", "text")


class PromptsError(ValueError):
    """The file of prompts cannot be used; the text says where and why."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """All lines that are not empty, in order; a JSON object is asked for its prompt."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"The prompts {path} cannot be read: {error}") from None
    found = [
        _prompt(line.rstrip("\r"), f"Line {number} of {path}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise PromptsError(f"{path} holds no prompt.")
    return tuple(found)


def _prompt(line: str, where: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        read = json.loads(line)
    except ValueError as error:
        raise PromptsError(f"{where} is no JSON: {error}") from None
    said = next((read[key] for key in _KEYS if key in read), None)
    if not isinstance(said, str) or not said:
        raise PromptsError(f'{where} must be {{"prompt": "..."}}, or a line of plain text.')
    return said


# Texts whose labels are known: a file of `text<TAB>label` lines, given by the user.


class LabelledError(ValueError):
    """The file of labelled texts cannot be used; the text says where and why."""


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text to classify, and the right answer."""

    text: str
    label: str


def read_labelled(path: Path) -> list[LabelledText]:
    """All lines that are not empty, in order."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabelledError(f"The labelled texts {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, tab, label = line.rstrip("\r").rpartition("\t")
        if not (tab and text.strip() and label.strip()):
            raise LabelledError(f"Line {number} of {path} is not text, a tab, and a label.")
        found.append(LabelledText(text, label.strip()))
    if not found:
        raise LabelledError(f"{path} holds no labelled text.")
    return found


# Every way in which a test can be refused before its first request.
REFUSALS = (LabelledError, MixError, ObjectiveError, PromptsError, TargetError, TraceError)
_APART = 1_000_003  # more requests than a process sends; a prime, so that texts differ too
_CLASSIFY_CHARACTERS = 4.0  # of English, to a token: answers of classifiers do not say


class Plan:
    """Deals out requests to the callers, and collects what they saw."""

    def __init__(self, terms: Terms, offers: Sequence[Offer], sender: int = 0) -> None:
        """Of a closed loop each sender, by its number, deals out requests of its own."""
        self.terms = terms
        self.outcomes: list[Outcome] = []
        # Of the processes that send, by name, and of those that were lost.
        self.generators: dict[str, Generator] = {}
        self.due_of: dict[str, int] = {}
        self.lost = 0
        self.due = 0  # in this process, of an open loop
        self.left = terms.requests  # in this process, of a closed loop; None: no limit
        self.under_way = 0  # the same
        self._warm_s: float | None = None  # when the warm-up of a closed loop is over
        self.users = 0  # at most at a time
        self.begin_s: float | None = None  # of an open loop; of the epoch, as is the end
        self.ended_s: float | None = None
        self.interrupted = False
        self.published = False
        self.key = read_key(terms.api_key_file)
        self.weights = resolve_mix(terms.mix or None, offers)
        self._offers = {offer.model: offer for offer in offers}
        self._objective = parse_objective(terms.objective)
        self._labelled = self._read_labelled()
        self._prompts = self._read_prompts()
        self._objective.check(self.weights, bool(self._labelled))
        first = sender * _APART
        seed = terms.seed + first
        self._operations = RoundRobin(self.weights, seed)
        self._turns = itertools.count(first)
        self._draw = random.Random(f"{seed}/lengths")
        self._lengths = parse_lengths(terms.prompt_tokens)
        self._think_time = parse_think_time(terms.think_time) if terms.think_time else None
        self._thinking = random.Random(f"{seed}/thinking")
        self._characters = self._measure_characters()
        self.schedule = self._lay() if terms.open else None

    def next_request(self) -> tuple[Shot, bytes]:
        """What a caller of a closed loop sends now, unless none is `left`."""
        now_s = time.monotonic()
        if self._warm_s is None:
            self._warm_s = now_s + self.terms.warm_up_s
        counted = now_s >= self._warm_s
        if counted and self.left is not None:
            self.left -= 1
        length = self._draw.randint(*self._lengths) if self._lengths else None
        stage = 0 if counted else WARM_UP
        shot = Shot(0.0, stage, self._operations.next(), next(self._turns), length)
        return shot, self.body(shot)

    def think_s(self) -> float:
        """How long a caller of a closed loop thinks now."""
        return self._think_time.draw_s(self._thinking) if self._think_time else 0.0

    def body(self, shot: Shot) -> bytes:
        """The body of a request; the same shot always says the same."""
        operation, turn = shot.operation, shot.turn
        offer = self._offers[operation.model]
        fields: dict[str, Any] = {"model": operation.model, **operation.ask.fields}
        if operation.endpoint == "classify":
            fields["input"] = self._text(offer, shot)
        else:
            prompt, tokens = self._prompt(offer, shot)
            endpoint = ENDPOINTS[operation.endpoint]
            chat = {"messages": [{"role": "user", "content": prompt}]}
            fields |= chat if endpoint.chats else {"prompt": prompt}
            fields |= {"max_tokens": tokens, "seed": turn}
            if endpoint.streams:
                fields["stream"] = True
        return json.dumps(fields).encode()

    def is_correct(self, shot: Shot, label: str | None) -> bool | None:
        """Whether an answer is the known one; None if that is not known."""
        texts = self._labelled.get(shot.operation.model)
        if not texts or shot.operation.endpoint != "classify" or label is None:
            return None
        return texts[shot.turn % len(texts)].label == label

    def note(self, sender: str, due: int, generator: Generator) -> None:
        """What one of the processes that send told of itself."""
        self.due_of[sender], self.generators[sender] = due, generator

    def hand_over(self, generator: Generator) -> dict[str, Any]:
        """What came of it in this process since the last time, as plain data for another."""
        outcomes = [outcome.to_wire() for outcome in self.outcomes]
        self.outcomes.clear()
        return {"outcomes": outcomes, "due": self.due, "generator": generator.to_wire()}

    def take_over(self, data: dict[str, Any], sender: str) -> None:
        """The inverse of `hand_over`."""
        if "outcomes" in data:  # not before its test has begun
            self.outcomes += map(Outcome.from_wire, data["outcomes"])
            self.note(sender, data["due"], Generator.from_wire(data["generator"]))

    def report(self, now_s: float) -> Report:
        """The test so far; of stages that are not over, as much as there was."""
        stages: Sequence[Stage]
        counted = [one for one in self.outcomes if one.stage != WARM_UP]
        if self.schedule is None:
            begin_s = min((one.started_s for one in counted), default=0.0)
            end_s = max((one.ended_s for one in counted), default=begin_s)
            stages = [Stage(0.0, end_s - begin_s, None)]
            due, short = None, self.interrupted
        else:
            begin_s = now_s if self.begin_s is None else self.begin_s
            due = sum(self.due_of.values())
            # After the last request nothing more is due: the rest of the time is a part of it.
            complete = self.ended_s is not None and due >= len(self.schedule.shots)
            until_s = math.inf if complete else (self.ended_s or now_s) - begin_s
            whole = [stage.until(until_s) for stage in self.schedule.stages]
            stages = [stage for stage in whole if stage.duration_s > 0] or whole[:1]
            short = until_s < self.schedule.length_s
        health = judge(
            [one.lag_ms for one in counted],
            due,
            len(self.outcomes) if self.ended_s else None,
            self.lost,
            list(self.generators.values()),
            self.terms.max_lag_ms,
        )
        return build_report(
            terms=self.terms,
            users=self.users,
            objective=self._objective,
            operations=list(self.weights),
            stages=stages,
            begin_s=begin_s,
            outcomes=counted,
            health=health,
            ended_early=short,
            labelled=max(map(len, self._labelled.values()), default=None),
        )

    def _lay(self) -> Schedule:
        trace = read_trace(Path(self.terms.trace)) if self.terms.shape == "replay" else []
        return Scheduler(self.terms, self.weights, trace).lay()

    def _read_prompts(self) -> tuple[str, ...]:
        if not self.terms.prompts:
            return ()
        if all(one.endpoint == "classify" for one in self.weights):
            raise PromptsError(
                f"The prompts {self.terms.prompts} are for models that generate, and the mix has "
                "none. --labels FILE has texts to classify."
            )
        return read_prompts(Path(self.terms.prompts))

    def _read_labelled(self) -> dict[str, list[LabelledText]]:
        """The texts with labels of each model that knows these labels, in an order by seed."""
        if not self.terms.labels:
            return {}
        texts = read_labelled(Path(self.terms.labels))
        random.Random(f"{self.terms.seed}/labels").shuffle(texts)
        labels = {one.label for one in texts}
        asked = {one.model for one in self.weights if one.endpoint == "classify"}
        fitting = [model for model in sorted(asked) if labels <= {*self._offers[model].labels}]
        if not fitting:
            known = "; ".join(f"{model}: {_listed(self._offers[model])}" for model in sorted(asked))
            raise LabelledError(
                f"No classifier of the mix knows all labels of {self.terms.labels}, which are "
                f"{', '.join(sorted(labels))}. Labels: {known or 'none, nothing is classified'}."
            )
        return dict.fromkeys(fitting, texts)

    def _measure_characters(self) -> dict[str, float]:
        if not (self._lengths or self.terms.shape == "replay"):
            return {}
        models = {one.model for one in self.weights if one.endpoint != "classify"}
        return {
            model: characters_per_token(self.terms.url, self._offers[model], self.key)
            for model in sorted(models)
        }

    def _text(self, offer: Offer, shot: Shot) -> str:
        if labelled := self._labelled.get(offer.model):
            return labelled[shot.turn % len(labelled)].text
        texts = offer.examples or TEXTS
        text = texts[shot.turn % len(texts)]
        if shot.prompt_tokens is None:
            return text
        tokens = min(shot.prompt_tokens, offer.max_tokens or shot.prompt_tokens)
        return lengthened(text, texts, shot.turn, round(tokens * _CLASSIFY_CHARACTERS))

    def _prompt(self, offer: Offer, shot: Shot) -> tuple[str, int]:
        """The prompt, and the most tokens of its answer: together within the window."""
        prompts = self._prompts or offer.examples or PROMPTS
        prompt = prompts[shot.turn % len(prompts)]
        window = offer.max_tokens
        half = max(window // 2, 1) if window else None
        if shot.prompt_tokens is None:
            # A character is at least as much as a token, so half the window is for the answer.
            return prompt[:half], self.terms.max_tokens
        tokens = min(shot.prompt_tokens, half or shot.prompt_tokens)
        characters = max(round(tokens * self._characters[offer.model]), 1)
        if shot.output_tokens is None:
            output = self.terms.max_tokens
        else:
            output = min(shot.output_tokens, half or shot.output_tokens)
        return lengthened(prompt, prompts, shot.turn, characters), output


def _listed(offer: Offer) -> str:
    return ", ".join(offer.labels) or "unknown"
