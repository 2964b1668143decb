"""The seconds of a call: by model, kind of call, steps, rows and length, learned from every call.

The seconds of a call are `speed * (a + b * tokens + c * tokens * length)`: a row has `length`
tokens, or one where it decodes, behind `length` that are cached.
"""

from collections.abc import Callable, Sequence
from operator import mul
from threading import Lock
from typing import NamedTuple

from serve.bundle.manifest import Latency
from serve.engine.job import CallKind, LaneKey, Turn
from serve.parts import count_parts

# How fast the machine runs the calls of one model now, beside what is known of them. A moment's
# slowness need not meet all calls alike: where something else takes half of a core, calls in
# several parts take half as long again, and those in one part as long as before. So each kind has
# a speed of its own, which moves the other a little. What is off beyond that is met with caution.


_MOST_SURPRISE = 0.35  # a call that took longer or shorter by more counts as if by this much
_WEIGHT = 0.12  # of the newest call in the speed of its kind
_OTHER_WEIGHT = 0.03  # and of the other
_LASTING_WEIGHT = 0.02  # of the speed of now in the one that lasts beyond a moment
_LATE_SHARE, _LATE_STEP = 0.05, 0.02
_MOST_CAUTION = 2.0
_CAUTION_DECAY = 0.9


class MachineSpeed:
    """What to multiply predictions by: more than 1 where calls take longer than they did."""

    def __init__(self) -> None:
        self.now = [1.0, 1.0]  # of calls in one part, in several
        self._lasting = [1.0, 1.0]
        self.caution = 1.1  # what to multiply them by beside that, so that few calls take longer

    def lasting(self, parted: bool) -> float:
        """What to multiply predictions of a long time by: a moment's slowness passes."""
        return self._lasting[parted] / self.now[parted]

    def be_wary(self, error: float) -> None:
        """A call has taken longer than was predicted, by this share."""
        late = 1 + error > self.caution
        change = _LATE_STEP * ((1 - _LATE_SHARE) if late else -_LATE_SHARE)
        self.caution = min(_MOST_CAUTION, max(1.0, self.caution + change))

    def observe(self, parted: bool, error: float) -> None:
        """The same where it is the machine that is to blame."""
        surprise = min(_MOST_SURPRISE, max(-_MOST_SURPRISE, error))
        self.now[parted] *= 1 + _WEIGHT * surprise
        self.now[not parted] *= 1 + _OTHER_WEIGHT * surprise
        for kind, speed in enumerate(self.now):
            self._lasting[kind] += _LASTING_WEIGHT * (speed - self._lasting[kind])

    def lower_caution(self) -> None:
        """Believe a little less in what is slow."""
        self.caution = max(1.0, self.caution * _CAUTION_DECAY)
        self.now = [max(min(1.0, speed), speed * _CAUTION_DECAY) for speed in self.now]


# What a rung of unknown shape is taken to spend beside its tokens.
_FIXED_SHARE = 0.1
_FORGET = 0.998  # of the shape, a call
_UNEVEN_WEIGHT, _MOST_UNEVEN = 0.08, 0.1  # of the newest call in what one number of rows takes
_TRUSTED = 0.12  # error of a call; the larger ones count less for the shape
_LEAST = 1e-12  # of the factor of a token
_SLOW_SHARE, _SLOW_STEP = 0.01, 0.04  # of answers on their way out
IDLE_ANSWER_S, _MOST_ANSWER_S = 0.002, 1.0
_KNOWN_CALLS = 24  # of a series, before it says anything of the machine
_ROUNDS = 100  # of their fit
_SCALE = 1000.0  # keeps products of tokens near 1
_UNKNOWN = MachineSpeed()  # of a model none of whose calls was seen


# The seconds of a call, as a line over the length of its rows: at length 0, and each more.
CostLine = tuple[float, float]


class CostKey(NamedTuple):
    """Calls whose time differs only by their rows and length."""

    model: str
    kind: CallKind
    steps: int | None  # None: one step of rows at any
    threshold: float | None = None  # of early answers


class LatencyModel:
    """Predicts calls, and learns from them. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()  # held by whatever writes, for microseconds
        self._curves: dict[CostKey, _CostCurve] = {}
        self._parted: dict[CostKey, _CostCurve] = {}  # of calls in several parts
        self._most_parts: dict[str, int] = {}  # by model, where there may be several
        self._uneven: dict[str, dict[int, float]] = {}  # there, by rows: how much longer calls take
        self._speeds: dict[str, MachineSpeed] = {}  # by model
        self._answer_s = IDLE_ANSWER_S

    @property
    def answer_s(self) -> float:
        """From the end of a call until its answer has left: few answers take longer."""
        return self._answer_s

    def observe_answer(self, seconds: float) -> None:
        """An answer has left so long after the end of its last call."""
        with self._lock:
            slow = seconds > self._answer_s
            change = _SLOW_STEP * ((1 - _SLOW_SHARE) if slow else -_SLOW_SHARE)
            self._answer_s = min(_MOST_ANSWER_S, self._answer_s * (1 + change))

    def lower_caution(self) -> None:
        """Something was refused though nothing runs: believe a little less in what was slow."""
        with self._lock:
            self._answer_s = max(IDLE_ANSWER_S, self._answer_s * _CAUTION_DECAY)
            for speed in self._speeds.values():
                speed.lower_caution()

    def caution(self, model: str) -> float:
        """What to multiply a prediction by so that few calls take longer."""
        return self._speeds.get(model, _UNKNOWN).caution

    def lasting(self, model: str) -> float:
        """What to multiply predictions of a long time by, in which calls are of many rows."""
        return self._speeds.get(model, _UNKNOWN).lasting(model in self._most_parts)

    def share_rows(self, model: str, most_parts: int) -> None:
        """Rows of this model's classifications run in so many parts at once, at most."""
        if most_parts > 1:
            with self._lock:
                self._most_parts[model] = most_parts
                self._uneven[model] = {}

    def knows(self, cost_key: CostKey) -> bool:
        return cost_key in self._curves or cost_key in self._parted

    def knows_well(self, cost_key: CostKey) -> bool:
        """Whether enough calls were seen to tell what a row costs from what a call does."""
        curves = self._curves.get(cost_key), self._parted.get(cost_key)
        return sum(curve.seen for curve in curves if curve is not None) >= _KNOWN_CALLS

    def call_s(self, cost_key: CostKey, rows: int, length: int) -> float | None:
        """The time of one call; None if nothing like it was ever seen."""
        model = cost_key.model
        most_parts = self._most_parts.get(model)
        if most_parts is None:
            curve = self._curves.get(cost_key)
            return None if curve is None else self._now(model) * curve.seconds(rows, length)
        parts = count_parts(rows, most_parts)
        speed = self._now(model, parts > 1) * self._uneven.get(model, {}).get(rows, 1.0)
        own, other = self._curves, self._parted
        if parts > 1:
            own, other = other, own
        curve = own.get(cost_key) or other.get(cost_key)
        return None if curve is None else speed * curve.seconds(-(-rows // parts), length)

    def decode_line(self, cost_key: CostKey, rows: int) -> CostLine | None:
        """The time of a token of so many rows; None if none was ever seen."""
        curve = self._curves.get(cost_key)
        if curve is None:
            return None
        a, b, c = curve.factors
        speed = self._now(cost_key.model)
        tokens = speed * rows / _SCALE
        return speed * a + tokens * b, tokens * c / _SCALE

    def learn(self, model: str, latency: Latency) -> None:
        """Start from a table that was measured before, on this machine or on another."""
        found: dict[_CostCurve, list[tuple[int, int, float]]] = {}
        for entry in sorted(latency.entries, key=lambda entry: entry.batch * entry.length):
            cost_key = CostKey(model, entry.kind, entry.steps)
            length, seconds = max(1, entry.length), entry.median_ms / 1000
            with self._lock:
                curve, rows = self._curve(cost_key, entry.batch, length, seconds)
            found.setdefault(curve, []).append((rows, length, seconds))
        for curve, points in found.items():  # of a model that nobody asks yet: without the lock
            curve.fit(points)
            for rows, length, seconds in points:
                curve.learn(rows, length, seconds)
            if len(points) >= len(curve.factors):  # its form is known: what is off is the machine
                curve.seen = _KNOWN_CALLS

    def rescale(self, cost_key: CostKey, rows: int, length: int, seconds: float) -> None:
        """Believe one careful measurement of this machine, for calls in as many parts."""
        with self._lock:
            curve, rows = self._curve(cost_key, rows, length, seconds)
            curve.rescale(rows, length, seconds)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        with self._lock:
            for curves in (self._curves, self._parted):
                for cost_key in [cost_key for cost_key in curves if cost_key.model == model]:
                    del curves[cost_key]
            self._speeds.pop(model, None)
            self._most_parts.pop(model, None)
            self._uneven.pop(model, None)

    def observe(self, cost_key: CostKey, rows: int, length: int, seconds: float) -> None:
        """A call has run: the next prediction takes it into account."""
        if seconds <= 0:
            return
        with self._lock:
            speed = self._speeds.setdefault(cost_key.model, MachineSpeed())
            uneven, all_rows = self._uneven.get(cost_key.model, {}), rows
            parted = count_parts(rows, self._most_parts.get(cost_key.model, 1)) > 1
            usual_s = seconds / uneven.get(all_rows, 1.0)
            curve, rows = self._curve(cost_key, rows, length, usual_s / speed.now[parted])
            error = usual_s / (speed.now[parted] * curve.seconds(rows, length)) - 1
            speed.be_wary(error)
            if curve.seen >= _KNOWN_CALLS:  # else it is the shape that is wrong
                speed.observe(parted, error)
            surprise = min(_MOST_UNEVEN, max(-_MOST_UNEVEN, error))
            uneven[all_rows] = uneven.get(all_rows, 1.0) * (1 + _UNEVEN_WEIGHT * surprise)
            curve.learn(rows, length, usual_s / speed.now[parted])

    def _now(self, model: str, parted: bool = False) -> float:
        return self._speeds.get(model, _UNKNOWN).now[parted]

    def _curve(
        self, cost_key: CostKey, rows: int, length: int, seconds: float
    ) -> tuple["_CostCurve", int]:
        """What is known of calls of so many rows, of which one took so long; rows that count.

        With the lock held.
        """
        parts = count_parts(rows, self._most_parts.get(cost_key.model, 1))
        curves, other = self._curves, self._parted
        if parts > 1:
            curves, other = other, curves
        rows = -(-rows // parts)
        if cost_key not in curves:
            like = other.get(cost_key)
            curves[cost_key] = _CostCurve(rows, length, seconds, cost_key.kind == "decode", like)
        return curves[cost_key], rows


class _CostCurve:
    """The seconds of a call at speed 1: least squares of relative errors that forget."""

    def __init__(
        self,
        rows: int,
        length: int,
        seconds: float,
        one_each: bool,
        like: "_CostCurve | None" = None,
    ) -> None:
        self.seen = 0
        self._one_each = one_each  # one new token a row, however long
        features = self._features(rows, length)
        self.factors = [
            _FIXED_SHARE * seconds,
            (1 - _FIXED_SHARE) * seconds / features[1],
            0.0,
        ]
        if like is not None:
            ratio = seconds / like.seconds(rows, length)
            self.factors = [factor * ratio for factor in like.factors]
        # Factors are known in parts of what would explain the whole call. What is known of them
        # sums up, is forgotten, and falls back to this: each may be wrong by one such part.
        self._parts = [seconds / feature for feature in features]
        self._known = 1.0, 0.0, 0.0, 1.0, 0.0, 1.0  # a symmetric matrix by rows

    def seconds(self, rows: int, length: int) -> float:
        a, b, c = self.factors  # asked for every request that comes: hence no call
        tokens = (rows if self._one_each else rows * length) / _SCALE
        return a + tokens * (b + c * length / _SCALE)

    def rescale(self, rows: int, length: int, seconds: float) -> None:
        ratio = seconds / self.seconds(rows, length)
        self.factors = [factor * ratio for factor in self.factors]

    def fit(self, points: Sequence[tuple[int, int, float]]) -> None:
        """Take the factors, none below 0, whose relative errors have the least squares."""
        shares = [
            [feature / seconds for feature in self._features(rows, length)]
            for rows, length, seconds in points
        ]
        for _ in range(_ROUNDS):  # one factor after the other
            for index in range(3):
                self.factors[index] = 0.0
                left = sum(one[index] * (1 - sum(map(mul, self.factors, one))) for one in shares)
                self.factors[index] = max(0.0, left / sum(one[index] ** 2 for one in shares))

    def learn(self, rows: int, length: int, seconds: float) -> None:
        """One step of recursive least squares on seconds / prediction.

        Written out, since it follows every call: the symmetric matrix of what is known, and its
        inverse but for a factor, are six numbers each.
        """
        self.seen += 1
        predicted = self.seconds(rows, length)
        error = seconds / predicted - 1
        weight = 1 / (_TRUSTED * max(_TRUSTED, abs(error)))
        first, second, third = self._features(rows, length)
        base, token, cached = self.factors
        base_part, token_part, cached_part = self._parts
        u = base_part * first / predicted
        v = token_part * second / predicted
        w = cached_part * third / predicted
        uu, uv, uw, vv, vw, ww = self._known
        uu = _FORGET * uu + weight * u * u + (1 - _FORGET)
        vv = _FORGET * vv + weight * v * v + (1 - _FORGET)
        ww = _FORGET * ww + weight * w * w + (1 - _FORGET)
        uv = _FORGET * uv + weight * u * v
        uw = _FORGET * uw + weight * u * w
        vw = _FORGET * vw + weight * v * w
        self._known = uu, uv, uw, vv, vw, ww
        uu_, uv_, uw_ = vv * ww - vw * vw, uw * vw - uv * ww, uv * vw - uw * vv
        vv_, vw_, ww_ = uu * ww - uw * uw, uv * uw - uu * vw, uu * vv - uv * uv
        gain = weight * error / (uu * uu_ + uv * uv_ + uw * uw_)
        base += base_part * gain * (uu_ * u + uv_ * v + uw_ * w)
        token += token_part * gain * (uv_ * u + vv_ * v + vw_ * w)
        cached += cached_part * gain * (uw_ * u + vw_ * v + ww_ * w)
        self.factors = [max(0.0, base), max(_LEAST, token), max(0.0, cached)]
        if min(base, token, cached) < 0:
            # Those that are left may say more than was learned: not more than before, too.
            said = base * first + token * second + cached * third
            if (now := self.seconds(rows, length)) > max(predicted, said):
                self.factors = [factor * said / now for factor in self.factors]

    def _features(self, rows: int, length: int) -> tuple[float, float, float]:
        tokens = (rows if self._one_each else rows * length) / _SCALE
        return 1.0, tokens, tokens * length / _SCALE


# What the rows of one classification lane cost at each number of steps. A lane's view of the
# latency model: careful, since prices decide whether a deadline can be kept, and nothing where
# nothing was ever measured.


_NEWEST = 0.05  # weight of the newest row in the usual length
_NEARLY = 1.03  # as cheap a row as in a full call
_NEWEST_CALL = 0.2  # and of the newest call in the usual batch and padding


class ClassifyCosts:
    """Seconds of calls and of rows."""

    def __init__(self, latency: LatencyModel, key: LaneKey, max_rows: int) -> None:
        self._latency = latency
        self._key = key
        self._max_rows = max_rows
        self._cost_keys: dict[int, CostKey] = {}
        self._usual_tokens = 0.0
        self._usual_rows = 1.0
        self._usual_padding = 1.0  # tokens of a call for each real one

    @property
    def answer_s(self) -> float:
        """From the end of a call until the answer has left."""
        return self._latency.answer_s

    @property
    def caution(self) -> float:
        """What all prices here are multiplied with."""
        return self._latency.caution(self._key.model)

    def note_call(self, rows: int, padding: float) -> None:
        """So many rows run together, with so many tokens for each real one."""
        self._usual_rows += _NEWEST_CALL * (rows - self._usual_rows)
        self._usual_padding += _NEWEST_CALL * (padding - self._usual_padding)

    def note(self, tokens: int) -> None:
        """A row of this length has come."""
        usual = self._usual_tokens or tokens
        self._usual_tokens = usual + _NEWEST * (tokens - usual)

    def call_s(self, steps: int, rows: int, length: int) -> float:
        """A call takes about this long, and seldom longer."""
        seconds = self._latency.call_s(self._cost_key_of(steps), rows, length)
        if seconds is None and self._key.threshold is not None:  # at worst all steps are taken
            full = CostKey(self._key.model, "classify", steps)
            seconds = self._latency.call_s(full, rows, length)
        return 0.0 if seconds is None else seconds * self.caution

    def row_s(self, steps: int, length: int) -> float:
        """The share of a row in a call as they usually are."""
        rows = round(self._usual_rows)
        return self.call_s(steps, rows, round(length * self._usual_padding)) / rows

    def usual_s(self, steps: int) -> float:
        """A usual call: a row is done when all that share its call are."""
        return self.call_s(steps, round(self._usual_rows), round(self._usual_tokens))

    def enough_rows(self, steps: int, length: int) -> int:
        """The fewest rows of a call that does nearly as many in a second as a full one.

        More would only wait for each other.
        """
        if not self._latency.knows_well(self._cost_key_of(steps)):
            return self._max_rows
        each_s = self.call_s(steps, self._max_rows, length) / self._max_rows
        rows = 1
        while rows < self._max_rows and self.call_s(steps, rows, length) / rows > _NEARLY * each_s:
            rows *= 2
        return min(rows, self._max_rows)

    def share(self, steps: int, full: int) -> float:
        """What a usual row costs at these steps, in parts of what it costs at full ones."""
        length = round(self._usual_tokens)
        whole = self.row_s(full, length)
        return self.row_s(steps, length) / whole if whole > 0 else steps / full

    def alone_s(self, steps: int, lengths: tuple[int, ...]) -> float:
        """The time of all these rows on an idle server."""
        rows = len(lengths)
        longest = max(lengths)
        if rows <= self._max_rows:
            return self.call_s(steps, rows, longest)
        return -(-rows // self._max_rows) * self.call_s(steps, self._max_rows, longest)

    def _cost_key_of(self, steps: int) -> CostKey:
        cost_key = self._cost_keys.get(steps)
        if cost_key is None:
            cost_key = CostKey(self._key.model, "classify", steps, self._key.threshold)
            self._cost_keys[steps] = cost_key
        return cost_key


# What the calls take that write: prompts, tokens of rows that decode together, steps of searches.
# A view of the latency model, as it is likely; 0 where nothing is known.


class GenerateCosts:
    """Seconds of calls."""

    def __init__(self, latency: LatencyModel, usual_s: Callable[[LaneKey], float | None]) -> None:
        self._latency = latency
        self._usual_s = usual_s  # of a token, or of a step of a search

    def token(self, key: LaneKey, rows: int, cost_key: CostKey | None = None) -> CostLine:
        """A token of so many rows of a lane; its series, if that is at hand."""
        cost_key = cost_key or CostKey(key.model, "decode", key.steps)
        return self._latency.decode_line(cost_key, rows) or (self._usual_s(key) or 0.0, 0.0)

    def prompts_s(
        self, key: LaneKey, tokens: int, prompts: int, cost_key: CostKey | None = None
    ) -> float:
        """The time to read so many prompts of so many tokens in all, one after the other."""
        cost_key = cost_key or CostKey(key.model, "prefill", key.steps)
        return prompts * (self._latency.call_s(cost_key, 1, tokens // prompts) or 0.0)

    def search_s(self, key: LaneKey, source: int, tokens: int, beams: int) -> float:
        """All calls of a search; the first one reads its source."""
        steps_s = (tokens - 1) * self.search_call_s(key, beams, tokens // 2 + 1)
        return self.prompts_s(key, source, 1) + steps_s

    def search_call_s(self, key: LaneKey, beams: int, length: int) -> float:
        """One token more for all hypotheses, which are rows of this length."""
        searched = CostKey(key.model, "search", key.steps)
        decoded = CostKey(key.model, "decode", key.steps)  # which runs the same graph
        known = decoded if self._latency.knows(decoded) else searched
        if self._latency.knows_well(searched):
            known = searched
        return self._latency.call_s(known, beams, length) or self._usual_s(key) or 0.0


# How long the calls of each turn took lately: what goes on beside a request.


_PACE_WEIGHT = 0.2  # of the newest call in the average of its kind


class CallTimes:
    """The recent time of a call, for each turn."""

    def __init__(self) -> None:
        self._seconds: dict[Turn, float] = {}

    def observe(self, turn: Turn, seconds: float) -> None:
        known = self._seconds.get(turn)
        self._seconds[turn] = seconds if known is None else known + _PACE_WEIGHT * (seconds - known)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._seconds = {turn: one for turn, one in self._seconds.items() if turn[0].model != model}

    def seconds(self, turn: Turn) -> float | None:
        """The average, or None if no such call has run yet."""
        return self._seconds.get(turn)
