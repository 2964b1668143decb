"""Prospects: what is predicted of a request, given all that waits and runs now.

Reads the lanes and changes none. It deliberately knows neither what is done about it nor HTTP.
"""

from collections.abc import Callable, Mapping
from typing import Generic

from serve.bundle.manifest import LatencyEntry
from serve.scheduler.classifying import Classifying
from serve.scheduler.decoding import Decoding
from serve.scheduler.job import Job, LaneKey, Turn, WorkT
from serve.scheduler.latency_model import LatencyModel, Series
from serve.scheduler.limits import Limits
from serve.scheduler.outlook import Outlook
from serve.scheduler.search_lane import SearchLane
from serve.scheduler.writing_prices import WritingPrices

# The usual time of a call, if one has run.
CallSeconds = Callable[[Turn], float | None]


class Prospects(Generic[WorkT]):
    """Predicts for one scheduler."""

    def __init__(
        self,
        limits: Limits,
        latency: LatencyModel,
        usual_s: CallSeconds,
        classifying: Classifying[WorkT],
        search: Mapping[LaneKey, SearchLane[WorkT]],
        decodings: Mapping[str, Decoding[WorkT]],
        busy_turns: Callable[[str], list[Turn]],
    ) -> None:
        self._limits = limits
        self._latency = latency
        self._usual_s = usual_s
        self._prices = WritingPrices(latency, self._usual_token_s)
        self._classifying = classifying
        self._search = search
        self._decodings = decodings  # by model
        self._busy_turns = busy_turns  # of all models but one
        self._busy_until_s = 0.0

    def begin(self, turn: Turn, now_s: float, seconds: float | None) -> None:
        """A call begins, which is predicted to take so long if anything is."""
        self._busy_until_s = now_s + (seconds or self._usual_s(turn) or 0.0)

    def rest(self) -> None:
        """Nothing runs."""
        self._busy_until_s = 0.0

    def beside_s(self, key: LaneKey) -> float:
        """What all other turns take between two calls of a lane of classifications."""
        others = (turn for turn in self._busy_turns("") if turn != (key, "classify"))
        return sum(self._usual_s(turn) or 0.0 for turn in others)

    def alone_s(self, key: LaneKey, steps: int, lengths: tuple[int, ...]) -> float:
        """The time of a classification on an idle server, until its answer has left."""
        return self._classifying.alone_s(key, steps, lengths)

    def least_late_s(self, key: LaneKey, steps: int, due_s: float, now_s: float) -> float:
        """By how much any classification due then would be late at least, as far as is known."""
        start_s = max(now_s, self._busy_until_s)
        return self._classifying.least_late_s(key, steps, due_s, start_s)

    def late_s(self, job: Job[WorkT], now_s: float) -> float:
        """By how much a classification, or one that it pushes back, would be late at worst."""
        start_s = max(now_s, self._busy_until_s)
        return self._classifying.late_s(job, start_s, self.beside_s(job.lane))

    def answer_s(self, key: LaneKey, measured: LatencyEntry | None) -> float | None:
        """The time until one call of this lane is over, if it were asked for now.

        Every busy turn gets one call a round, so that is as many rounds as the lane has calls
        ahead, and one more. The call is of the size that was measured, or of the usual one.
        """
        own: Turn = (key, "classify" if key.kind == "classify" else "decode")
        call_s = None
        if measured is not None:
            series = Series(key.model, measured.kind, key.steps)
            call_s = self._latency.call_s(series, measured.batch, measured.length)
            call_s = call_s or measured.median_ms / 1000
        call_s = call_s or self._usual_s(own)
        if call_s is None:
            return None
        others = (turn for turn in self._busy_turns("") if turn != own)
        round_s = call_s + sum(self._usual_s(turn) or 0.0 for turn in others)
        return round_s * (self._classifying.calls_ahead(key) + 1)

    def wait_s(
        self, now_s: float, least: bool = False, known: Outlook[WorkT] | None = None
    ) -> float:
        """How long until all that waits now has run, at the fewest steps or as it will be.

        The outlook of one model may be known already.
        """
        writing_s = 0.0
        for model in self._models_waiting(known):
            outlook = self.outlook(model) if known is None or model != known.model else known
            writing_s = max(writing_s, outlook.all_begin_s() * self._latency.lasting(model))
        work_s = self._classifying.wait_s(least) + writing_s
        return max(0.0, self._busy_until_s - now_s) + work_s

    def waiting_s(self) -> float:
        """The same without what runs already: the share of those that wait."""
        waiting_s = (
            self.outlook(model).waiting_s() * self._latency.lasting(model)
            for model in self._models_waiting()
        )
        return self._classifying.wait_s(least=False) + max(waiting_s, default=0.0)

    def outlook(self, model: str) -> Outlook[WorkT]:
        """What is predicted of generations of this model."""
        decoding = self._decodings.get(model)
        return Outlook(
            model,
            decoding or (),
            [lane for key, lane in self._search.items() if key.model == model]
            if self._search
            else (),
            self._latency,
            self._limits.decode_rows,
            self._prices,
            sum([self._usual_s(turn) or 0.0 for turn in self._busy_turns(model)]),
            decoding is not None and decoding.sharing == "together",
        )

    def _usual_token_s(self, lane: LaneKey) -> float | None:
        return self._usual_s((lane, "decode" if lane.kind == "generate" else "search"))

    def _models_waiting(self, known: Outlook[WorkT] | None = None) -> set[str]:
        """Those that write, and for which somebody waits; and the one that is known."""
        models = set() if known is None else {known.model}
        for model, decoding in self._decodings.items():
            if model not in models and any([lane.waiting for lane in decoding]):
                models.add(model)
        if not self._search:
            return models
        return models | {key.model for key, searches in self._search.items() if searches.waiting}
