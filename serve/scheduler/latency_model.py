"""How long a call takes: by model, kind of call, steps, rows and length, learned from every call.

The seconds of a call are `speed * (a + b * tokens + c * tokens * length)`: a row has `length`
tokens, or one where it decodes, behind `length` that are cached. Each series has its own a, b and
c, which change slowly; all of a model share the speed of the machine, which changes fast. Where the
rows of a classification run in parts side by side, those of the largest part count, and calls in
one part and in several have factors and a speed of their own. It starts from what was measured
before and forgets it. Knows neither clocks, requests nor lanes.

Three threads write: the engine's after each call, the event loop's after each answer and refusal,
and one that loads a model. Whatever writes holds a lock; what reads looks up one thing at a time.
"""

from collections.abc import Sequence
from operator import mul
from threading import Lock
from typing import NamedTuple

from serve.bundle.manifest import Latency
from serve.parts import count_parts
from serve.scheduler.job import CallKind
from serve.scheduler.machine_speed import MachineSpeed

# What a rung of unknown shape is taken to spend beside its tokens.
_FIXED_SHARE = 0.1
_FORGET = 0.998  # of the shape, a call
_UNEVEN_WEIGHT, _MOST_UNEVEN = 0.08, 0.1  # of the newest call in what one number of rows takes
_TRUSTED = 0.12  # error of a call; the larger ones count less for the shape
_LEAST = 1e-12  # of the factor of a token
_SLOW_SHARE, _SLOW_STEP = 0.01, 0.04  # of answers on their way out
IDLE_ANSWER_S, _MOST_ANSWER_S = 0.002, 1.0
_RELENT = 0.9
_KNOWN_CALLS = 24  # of a series, before it says anything of the machine
_ROUNDS = 100  # of their fit
_SCALE = 1000.0  # keeps products of tokens near 1
_UNKNOWN = MachineSpeed()  # of a model none of whose calls was seen


# The seconds of a call, as a line over the length of its rows: at length 0, and each more.
Line = tuple[float, float]


class Series(NamedTuple):
    """Calls whose time differs only by their rows and length."""

    model: str
    kind: CallKind
    steps: int | None  # None: one step of rows at any
    threshold: float | None = None  # of early answers


class LatencyModel:
    """Predicts calls, and learns from them. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()  # held by whatever writes, for microseconds
        self._shapes: dict[Series, _Shape] = {}
        self._parted: dict[Series, _Shape] = {}  # of calls in several parts
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

    def relent(self) -> None:
        """Something was refused though nothing runs: believe a little less in what was slow."""
        with self._lock:
            self._answer_s = max(IDLE_ANSWER_S, self._answer_s * _RELENT)
            for speed in self._speeds.values():
                speed.relent()

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

    def knows(self, series: Series) -> bool:
        return series in self._shapes or series in self._parted

    def knows_well(self, series: Series) -> bool:
        """Whether enough calls were seen to tell what a row costs from what a call does."""
        shapes = self._shapes.get(series), self._parted.get(series)
        return sum(shape.seen for shape in shapes if shape is not None) >= _KNOWN_CALLS

    def call_s(self, series: Series, rows: int, length: int) -> float | None:
        """The time of one call; None if nothing like it was ever seen."""
        model = series.model
        most_parts = self._most_parts.get(model)
        if most_parts is None:
            shape = self._shapes.get(series)
            return None if shape is None else self._now(model) * shape.seconds(rows, length)
        parts = count_parts(rows, most_parts)
        speed = self._now(model, parts > 1) * self._uneven.get(model, {}).get(rows, 1.0)
        own, other = self._shapes, self._parted
        if parts > 1:
            own, other = other, own
        shape = own.get(series) or other.get(series)
        return None if shape is None else speed * shape.seconds(-(-rows // parts), length)

    def decode_line(self, series: Series, rows: int) -> Line | None:
        """The time of a token of so many rows; None if none was ever seen."""
        shape = self._shapes.get(series)
        if shape is None:
            return None
        a, b, c = shape.factors
        speed = self._now(series.model)
        tokens = speed * rows / _SCALE
        return speed * a + tokens * b, tokens * c / _SCALE

    def learn(self, model: str, latency: Latency) -> None:
        """Start from a table that was measured before, on this machine or on another."""
        found: dict[_Shape, list[tuple[int, int, float]]] = {}
        for entry in sorted(latency.entries, key=lambda entry: entry.batch * entry.length):
            series = Series(model, entry.kind, entry.steps)
            length, seconds = max(1, entry.length), entry.median_ms / 1000
            with self._lock:
                shape, rows = self._shape(series, entry.batch, length, seconds)
            found.setdefault(shape, []).append((rows, length, seconds))
        for shape, points in found.items():  # of a model that nobody asks yet: without the lock
            shape.fit(points)
            for rows, length, seconds in points:
                shape.learn(rows, length, seconds)
            if len(points) >= len(shape.factors):  # its form is known: what is off is the machine
                shape.seen = _KNOWN_CALLS

    def rescale(self, series: Series, rows: int, length: int, seconds: float) -> None:
        """Believe one careful measurement of this machine, for calls in as many parts."""
        with self._lock:
            shape, rows = self._shape(series, rows, length, seconds)
            shape.rescale(rows, length, seconds)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        with self._lock:
            for shapes in (self._shapes, self._parted):
                for series in [series for series in shapes if series.model == model]:
                    del shapes[series]
            self._speeds.pop(model, None)
            self._most_parts.pop(model, None)
            self._uneven.pop(model, None)

    def observe(self, series: Series, rows: int, length: int, seconds: float) -> None:
        """A call has run: the next prediction takes it into account."""
        if seconds <= 0:
            return
        with self._lock:
            speed = self._speeds.setdefault(series.model, MachineSpeed())
            uneven, all_rows = self._uneven.get(series.model, {}), rows
            parted = count_parts(rows, self._most_parts.get(series.model, 1)) > 1
            usual_s = seconds / uneven.get(all_rows, 1.0)
            shape, rows = self._shape(series, rows, length, usual_s / speed.now[parted])
            error = usual_s / (speed.now[parted] * shape.seconds(rows, length)) - 1
            speed.be_wary(error)
            if shape.seen >= _KNOWN_CALLS:  # else it is the shape that is wrong
                speed.observe(parted, error)
            surprise = min(_MOST_UNEVEN, max(-_MOST_UNEVEN, error))
            uneven[all_rows] = uneven.get(all_rows, 1.0) * (1 + _UNEVEN_WEIGHT * surprise)
            shape.learn(rows, length, usual_s / speed.now[parted])

    def _now(self, model: str, parted: bool = False) -> float:
        return self._speeds.get(model, _UNKNOWN).now[parted]

    def _shape(
        self, series: Series, rows: int, length: int, seconds: float
    ) -> tuple["_Shape", int]:
        """What is known of calls of so many rows, of which one took so long; rows that count.

        With the lock held.
        """
        parts = count_parts(rows, self._most_parts.get(series.model, 1))
        shapes, other = self._shapes, self._parted
        if parts > 1:
            shapes, other = other, shapes
        rows = -(-rows // parts)
        if series not in shapes:
            like = other.get(series)
            shapes[series] = _Shape(rows, length, seconds, series.kind == "decode", like)
        return shapes[series], rows


class _Shape:
    """The seconds of a call at speed 1: least squares of relative errors that forget."""

    def __init__(
        self,
        rows: int,
        length: int,
        seconds: float,
        one_each: bool,
        like: "_Shape | None" = None,
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
