"""How long a call takes: by model, kind of call, steps, rows and length, learned from every call.

The seconds of a call are `speed * (a + b * rows * length + c * rows * length**2)`. Each series has
its own a, b and c, which change slowly; all share the speed of the machine, which changes fast. It
starts from what was measured before and forgets it. Knows neither clocks, requests nor lanes.
"""

from typing import NamedTuple

from serve.bundle.latency import Latency
from serve.scheduler.job import CallKind

# What a rung of unknown shape is taken to spend beside its tokens.
_FIXED_SHARE = 0.1
_FORGET = 0.985  # of the shape, a call
_SPEED_WEIGHT = 0.12  # of the newest call in the speed of the machine
_MOST_SURPRISE = 0.35  # a call that took longer or shorter by more counts as if by this much
_TRUSTED = 0.12  # error up to which a call counts fully for the shape
_MOST_SPREAD = 1.0  # how uncertain the shape may get, relative to itself
_LATE_SHARE, _LATE_STEP = 0.05, 0.02
_MOST_CAUTION = 2.0
_SLOW_SHARE, _SLOW_STEP = 0.01, 0.04  # of answers on their way out
IDLE_ANSWER_S, _MOST_ANSWER_S = 0.002, 1.0
_RELENT = 0.9
_KNOWN_CALLS = 24  # of a series, before it says anything of the machine
_PASSES = 8  # over measurements that are known beforehand
_SCALE = 1000.0  # keeps products of tokens near 1


class Series(NamedTuple):
    """Calls whose time differs only by their rows and length."""

    model: str
    kind: CallKind
    steps: int | None  # None: one step of rows at any
    threshold: float | None = None  # of early answers


class LatencyModel:
    """Predicts calls, and learns from them."""

    def __init__(self) -> None:
        self._shapes: dict[Series, _Shape] = {}
        self._speed = 1.0
        self._caution = 1.1
        self._answer_s = IDLE_ANSWER_S

    @property
    def answer_s(self) -> float:
        """From the end of a call until its answer has left: few answers take longer."""
        return self._answer_s

    def observe_answer(self, seconds: float) -> None:
        """An answer has left so long after the end of its last call."""
        slow = seconds > self._answer_s
        change = _SLOW_STEP * ((1 - _SLOW_SHARE) if slow else -_SLOW_SHARE)
        self._answer_s = min(_MOST_ANSWER_S, self._answer_s * (1 + change))

    def relent(self) -> None:
        """Something was refused though nothing runs: believe a little less in what was slow."""
        self._answer_s = max(IDLE_ANSWER_S, self._answer_s * _RELENT)
        self._caution = max(1.0, self._caution * _RELENT)
        self._speed = max(min(1.0, self._speed), self._speed * _RELENT)

    @property
    def caution(self) -> float:
        """What to multiply a prediction by so that few calls take longer."""
        return self._caution

    def knows(self, series: Series) -> bool:
        return series in self._shapes

    def call_s(self, series: Series, rows: int, length: int) -> float | None:
        """The time of one call; None if nothing like it was ever seen."""
        shape = self._shapes.get(series)
        return None if shape is None else self._speed * shape.seconds(rows, length)

    def learn(self, model: str, latency: Latency) -> None:
        """Start from a table that was measured before, on this machine or on another."""
        found: dict[Series, list[tuple[int, int, float]]] = {}
        for entry in latency.entries:
            series = Series(model, entry.kind, entry.steps)
            point = entry.batch, max(1, entry.length), entry.median_ms / 1000
            found.setdefault(series, []).append(point)
        for series, points in found.items():
            points.sort(key=lambda point: point[0] * point[1])
            for rows, length, seconds in [*points] * _PASSES:
                self._shape(series, rows, length, seconds).learn(rows, length, seconds)

    def rescale(self, series: Series, rows: int, length: int, seconds: float) -> None:
        """Believe one careful measurement of this machine as to how fast it is."""
        self._shape(series, rows, length, seconds).rescale(rows, length, seconds)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        for series in list(self._shapes):
            if series.model == model:
                del self._shapes[series]

    def observe(self, series: Series, rows: int, length: int, seconds: float) -> None:
        """A call has run: the next prediction takes it into account."""
        if seconds <= 0:
            return
        shape = self._shape(series, rows, length, seconds / self._speed)
        ratio = seconds / (self._speed * shape.seconds(rows, length))
        late = ratio > self._caution
        change = _LATE_STEP * ((1 - _LATE_SHARE) if late else -_LATE_SHARE)
        self._caution = min(_MOST_CAUTION, max(1.0, self._caution + change))
        if shape.seen >= _KNOWN_CALLS:  # else it is the shape that is wrong
            surprise = min(_MOST_SURPRISE, max(-_MOST_SURPRISE, ratio - 1))
            self._speed *= 1 + _SPEED_WEIGHT * surprise
        shape.learn(rows, length, seconds / self._speed)

    def _shape(self, series: Series, rows: int, length: int, seconds: float) -> "_Shape":
        if series not in self._shapes:
            self._shapes[series] = _Shape(rows, length, seconds)
        return self._shapes[series]


class _Shape:
    """The seconds of a call at speed 1: least squares of relative errors that forget."""

    def __init__(self, rows: int, length: int, seconds: float) -> None:
        self.seen = 0
        features = _features(rows, length)
        self._factors = [
            _FIXED_SHARE * seconds,
            (1 - _FIXED_SHARE) * seconds / features[1],
            0.0,
        ]
        # Each factor may be wrong by as much as would explain the whole call.
        self._doubt = [(seconds / feature) ** 2 for feature in features]
        self._covariance = [
            [self._doubt[row] if row == column else 0.0 for column in range(3)] for row in range(3)
        ]

    def seconds(self, rows: int, length: int) -> float:
        a, b, c = self._factors
        tokens = rows * length / _SCALE
        return a + tokens * (b + c * length / _SCALE)

    def rescale(self, rows: int, length: int, seconds: float) -> None:
        ratio = seconds / self.seconds(rows, length)
        self._factors = [factor * ratio for factor in self._factors]

    def learn(self, rows: int, length: int, seconds: float) -> None:
        """One step of recursive least squares on seconds / prediction."""
        self.seen += 1
        predicted = self.seconds(rows, length)
        x0, x1, x2 = (feature / predicted for feature in _features(rows, length))
        error = seconds / predicted - 1
        size = abs(error)
        if size > _TRUSTED:  # as large as it may be, and no larger
            error *= _TRUSTED / size
        p0, p1, p2 = self._covariance
        g0 = p0[0] * x0 + p0[1] * x1 + p0[2] * x2
        g1 = p1[0] * x0 + p1[1] * x1 + p1[2] * x2
        g2 = p2[0] * x0 + p2[1] * x1 + p2[2] * x2
        spread = x0 * g0 + x1 * g1 + x2 * g2
        noise = _TRUSTED**2
        share = 1 / (noise + spread)
        a, b, c = self._factors
        self._factors = [
            max(0.0, a + g0 * share * error),
            max(1e-12, b + g1 * share * error),
            max(0.0, c + g2 * share * error),
        ]
        gain = (g0, g1, g2)
        forget = 1 / _FORGET
        limit = _MOST_SPREAD
        for row, old in enumerate((p0, p1, p2)):
            scaled = gain[row] * share
            self._covariance[row] = [
                (old[column] - scaled * gain[column]) * forget for column in range(3)
            ]
        if any(self._covariance[i][i] > limit * self._doubt[i] for i in range(3)):
            self._covariance = [[value * _FORGET for value in row] for row in self._covariance]


def _features(rows: int, length: int) -> tuple[float, float, float]:
    tokens = rows * length / _SCALE
    return 1.0, tokens, tokens * length / _SCALE
