"""The cost of a call in seconds: predicted from its kind, steps, rows and length.

Learned from every call: `speed * (a + b * tokens + c * tokens * length)`. A row has `length`
tokens; a row that decodes has one, behind `length` cached positions.
"""

from collections import Counter
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from serve.bundle.manifest import Latency
from serve.engine.job import CallKind, LaneKey, Turn
from serve.parts import count_parts

_SURPRISE = 0.35  # larger errors of a call count as this
_SPEED_WEIGHT, _LASTING_WEIGHT = 0.12, 0.02  # of the newest call, for now and in the long term
# The present speed returns to the usual one by this part with each call. Else noise of the calls of
# one curve would move the speed without end, which only that curve could make up for.
_RETURN = 0.01
# The caution rises and falls so that this share of calls takes longer than predicted with it.
_LATE_SHARE, _LATE_STEP, _MOST_CAUTION = 0.05, 0.02, 2.0
_LOWER = 0.9  # factor on caution and speed after a refusal without need
_TRUSTED = 0.12  # errors above this count less for the curve
_FORGET = 0.998  # decay of what the curve has learned, per call
_FIXED_SHARE = 0.1  # of a call's cost, before anything is known
_LEAST = 1e-12  # least cost of a token
_KNOWN_CALLS = 24  # calls of a curve before its errors count for the machine's speed
_ROUNDS = 100  # of the first fit
_NOTHING_KNOWN = 1.0, 0.0, 0.0, 1.0, 0.0, 1.0  # a symmetric 3 x 3 matrix, by rows
_ROUNDING = 1e-13
_SCALE = 1000.0  # keeps products of tokens near 1
# Few answers take longer than predicted to leave.
_SLOW_SHARE, _SLOW_STEP = 0.01, 0.04
IDLE_ANSWER_S, _MOST_ANSWER_S = 0.002, 1.0
_PACE_WEIGHT = 0.2  # weight of the newest call in the recent time


# The cost of a call over the length of its rows: (seconds at length 0, seconds per position).
CostLine = tuple[float, float]


class CostKey(NamedTuple):
    """Calls that differ only in rows and length, and so share a cost curve."""

    kind: CallKind
    steps: int
    threshold: float | None = None  # of early answers


class AnswerTime:
    """The time from the end of a call until its answer has left; few answers take longer."""

    def __init__(self) -> None:
        self.seconds = IDLE_ANSWER_S

    def observe(self, seconds: float) -> None:
        """Note how long after its last call an answer left."""
        change = _SLOW_STEP * ((1 - _SLOW_SHARE) if seconds > self.seconds else -_SLOW_SHARE)
        self.seconds = min(_MOST_ANSWER_S, self.seconds * (1 + change))

    def lower(self) -> None:
        self.seconds = max(IDLE_ANSWER_S, self.seconds * _LOWER)


class Cost:
    """Predicts the cost of one model's calls and learns from them.

    A curve for each kind and number of steps gives the cost on a machine as it usually is. All
    share the present `speed`, since machines slow down for moments, and the `caution`, a factor
    with which few calls take longer. Written with the engine's lock held, or before the model is
    served.
    """

    def __init__(self, most_parts: int = 1) -> None:
        """Calls of classifications are split into up to `most_parts` parts."""
        self.caution = 1.1
        self._most_parts = most_parts
        self._curves: dict[CostKey, _CostCurve] = {}
        self._parted: dict[CostKey, _CostCurve] = {}  # of calls in several parts
        self._speed = self._lasting = 1.0  # above 1: slower than usual
        self._usual_s: dict[Turn, float] = {}

    @property
    def lasting(self) -> float:
        """The factor for predictions over a long time: short slowdowns pass."""
        return self._lasting / self._speed

    def lower_caution(self) -> None:
        """Lower caution and speed: a request was refused although nothing runs."""
        self.caution = max(1.0, self.caution * _LOWER)
        self._speed = max(min(1.0, self._speed), self._speed * _LOWER)

    def knows(self, cost_key: CostKey) -> bool:
        return cost_key in self._curves or cost_key in self._parted

    def knows_well(self, cost_key: CostKey) -> bool:
        """Whether enough calls were seen to tell the cost of a row from the cost of a call."""
        curves = [self._curves.get(cost_key), self._parted.get(cost_key)]
        return sum(curve.seen for curve in curves if curve is not None) >= _KNOWN_CALLS

    def call_s(self, cost_key: CostKey, rows: int, length: int) -> float | None:
        """The cost of one call; None if none like it was seen."""
        if self._most_parts > 1:
            parts = count_parts(rows, self._most_parts)
            rows = -(-rows // parts)
            if parts > 1 and (parted := self._parted.get(cost_key)) is not None:
                return self._speed * parted.seconds(rows, length)
        curve = self._curves.get(cost_key) or self._parted.get(cost_key)
        return None if curve is None else self._speed * curve.seconds(rows, length)

    def learn(self, latency: Latency) -> None:
        """Start from a measured latency table, of this machine or another."""
        found: dict[_CostCurve, list[tuple[int, int, float]]] = {}
        for entry in sorted(latency.entries, key=lambda entry: entry.batch * entry.length):
            cost_key = CostKey(entry.kind, entry.steps)
            length, seconds = max(1, entry.length), entry.median_ms / 1000
            curve, rows = self._curve(cost_key, entry.batch, length, seconds)
            found.setdefault(curve, []).append((rows, length, seconds))
        for curve, points in found.items():
            curve.fit(points)
            for rows, length, seconds in points:
                curve.learn(rows, length, seconds)
            # The curve's form is known; errors are the machine's.
            if len(points) >= len(curve.factors):
                curve.seen = _KNOWN_CALLS

    def rescale(self, cost_key: CostKey, rows: int, length: int, seconds: float) -> None:
        """Scale the curve to one careful measurement on this machine."""
        curve, rows = self._curve(cost_key, rows, length, seconds)
        curve.rescale(rows, length, seconds)

    def observe(self, cost_key: CostKey, rows: int, length: int, seconds: float) -> None:
        """Learn from a call that has run."""
        if seconds <= 0:
            return
        curve, rows = self._curve(cost_key, rows, length, seconds / self._speed)
        error = seconds / (self._speed * curve.seconds(rows, length)) - 1
        late = 1 + error > self.caution
        change = _LATE_STEP * ((1 - _LATE_SHARE) if late else -_LATE_SHARE)
        self.caution = min(_MOST_CAUTION, max(1.0, self.caution + change))
        if curve.seen >= _KNOWN_CALLS:  # else the curve is to blame
            self._speed *= 1 + _SPEED_WEIGHT * max(-_SURPRISE, min(_SURPRISE, error))
            self._speed **= 1 - _RETURN
            self._lasting += _LASTING_WEIGHT * (self._speed - self._lasting)
        curve.learn(rows, length, seconds / self._speed)

    # The recent time of a call of each lane and kind.

    def usual_s(self, turn: Turn) -> float | None:
        """The average; None before the first call."""
        return self._usual_s.get(turn)

    def observe_usual(self, turn: Turn, seconds: float) -> None:
        known = self._usual_s.get(turn)
        self._usual_s[turn] = seconds if known is None else known + _PACE_WEIGHT * (seconds - known)

    # Prefill, decoding and search, without caution; 0 where nothing is known.

    def token(self, key: LaneKey, rows: int) -> CostLine:
        """The cost of a token of this many rows."""
        curve = self._curves.get(CostKey("decode", key.steps))
        if curve is None:
            turn: Turn = (key, "decode" if key.kind == "generate" else "search")
            return self.usual_s(turn) or 0.0, 0.0
        a, b, c = curve.factors
        tokens = self._speed * rows / _SCALE
        return self._speed * a + tokens * b, tokens * c / _SCALE

    def prompts_s(self, key: LaneKey, tokens: int, prompts: int) -> float:
        """The time to prefill these prompts, one after the other."""
        return prompts * (self.call_s(CostKey("prefill", key.steps), 1, tokens // prompts) or 0.0)

    def search_s(self, key: LaneKey, source: int, tokens: int, beams: int) -> float:
        """The time of all calls of a search; the first reads its source."""
        steps_s = (tokens - 1) * self.search_call_s(key, beams, tokens // 2 + 1)
        return self.prompts_s(key, source, 1) + steps_s

    def search_call_s(self, key: LaneKey, beams: int, length: int) -> float:
        """The cost of one more token for all hypotheses, which are rows of this length."""
        searched = CostKey("search", key.steps)
        decoded = CostKey("decode", key.steps)  # the same graph
        known = decoded if self.knows(decoded) else searched
        if self.knows_well(searched):
            known = searched
        return self.call_s(known, beams, length) or self.usual_s((key, "search")) or 0.0

    def _curve(
        self, cost_key: CostKey, rows: int, length: int, seconds: float
    ) -> tuple["_CostCurve", int]:
        """The curve for calls of this many rows, and the rows in each of their parts."""
        parts = count_parts(rows, self._most_parts) if self._most_parts > 1 else 1
        rows = -(-rows // parts)
        curves, others = self._curves, self._parted
        if parts > 1:
            curves, others = others, curves
        curve = curves.get(cost_key)
        if curve is None:
            like = others.get(cost_key)
            curve = curves[cost_key] = _CostCurve(
                rows, length, seconds, cost_key.kind == "decode", like
            )
        return curve, rows


class _CostCurve:
    """The cost of a call at speed 1: weighted recursive least squares that forget."""

    def __init__(
        self,
        rows: int,
        length: int,
        seconds: float,
        one_each: bool,
        like: "_CostCurve | None" = None,
    ) -> None:
        self.seen = 0
        self._one_each = one_each  # one new token a row, whatever its length
        features = self._features(rows, length)
        self.factors = [
            _FIXED_SHARE * seconds,
            (1 - _FIXED_SHARE) * seconds / features[1],
            0.0,
        ]
        if like is not None:
            ratio = seconds / like.seconds(rows, length)
            self.factors = [factor * ratio for factor in like.factors]
        # Factors are scaled by what would explain the whole call. Without data each may be wrong by
        # one such unit; what was learned decays back to that.
        self._parts = [seconds / feature for feature in features]
        self._known = _NOTHING_KNOWN

    def seconds(self, rows: int, length: int) -> float:
        a, b, c = self.factors  # asked on every request: no call to _features
        tokens = (rows if self._one_each else rows * length) / _SCALE
        return a + tokens * (b + c * length / _SCALE)

    def rescale(self, rows: int, length: int, seconds: float) -> None:
        ratio = seconds / self.seconds(rows, length)
        self.factors = [factor * ratio for factor in self.factors]

    def fit(self, points: Sequence[tuple[int, int, float]]) -> None:
        """Fit factors of at least 0 to points, by least squares of relative errors."""
        shares = [
            [feature / seconds for feature in self._features(rows, length)]
            for rows, length, seconds in points
        ]
        for _ in range(_ROUNDS):  # coordinate descent
            for index in range(3):
                self.factors[index] = 0.0
                left = sum(one[index] * (1 - sum(map(mul, self.factors, one))) for one in shares)
                self.factors[index] = max(0.0, left / sum(one[index] ** 2 for one in shares))

    def learn(self, rows: int, length: int, seconds: float) -> None:
        """One step of recursive least squares on seconds / prediction.

        Written out because it follows every call: the symmetric matrix and its adjugate have six
        entries each.
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
        determinant = uu * uu_ + uv * uv_ + uw * uw_
        if determinant <= _ROUNDING * uu * vv * ww:  # nothing but rounding is left of it
            self._known = _NOTHING_KNOWN
            return
        gain = weight * error / determinant
        base += base_part * gain * (uu_ * u + uv_ * v + uw_ * w)
        token += token_part * gain * (uv_ * u + vv_ * v + vw_ * w)
        cached += cached_part * gain * (uw_ * u + vw_ * v + ww_ * w)
        self.factors = [max(0.0, base), max(_LEAST, token), max(0.0, cached)]
        if min(base, token, cached) < 0:
            # A factor was cut to 0: the others must not predict more than before because of it.
            said = base * first + token * second + cached * third
            if (now := self.seconds(rows, length)) > max(predicted, said):
                self.factors = [factor * said / now for factor in self.factors]

    def _features(self, rows: int, length: int) -> tuple[float, float, float]:
        tokens = (rows if self._one_each else rows * length) / _SCALE
        return 1.0, tokens, tokens * length / _SCALE


_NEWEST = 0.05  # weight of the newest row in the usual length
_NEARLY = 1.03  # this close to the cost of a row in a full call
_NEWEST_CALL = 0.2  # weight of the newest call in the usual batch and padding


class ClassifyCosts:
    """The costs of one classification lane at each number of steps.

    Costs include caution, since admission rests on them; 0 where nothing was measured.
    """

    def __init__(self, cost: Cost, key: LaneKey, max_rows: int) -> None:
        self._cost = cost
        self._key = key
        self._max_rows = max_rows
        self._cost_keys: dict[int, CostKey] = {}
        self._usual_tokens = 0.0
        self._usual_rows = 1.0
        self._usual_padding = 1.0  # tokens with padding, per real token

    @property
    def caution(self) -> float:
        """The factor that all costs here include."""
        return self._cost.caution

    def note_call(self, rows: int, padding: float) -> None:
        """Note a call: its rows, and its tokens per real token."""
        self._usual_rows += _NEWEST_CALL * (rows - self._usual_rows)
        self._usual_padding += _NEWEST_CALL * (padding - self._usual_padding)

    def note(self, tokens: int) -> None:
        """Note the length of a row that came."""
        usual = self._usual_tokens or tokens
        self._usual_tokens = usual + _NEWEST * (tokens - usual)

    def call_s(self, steps: int, rows: int, length: int) -> float:
        """The cost of a call; few take longer."""
        cost_key = self._cost_keys.get(steps) or self._cost_key_of(steps)
        seconds = self._cost.call_s(cost_key, rows, length)
        # In the mean a row takes no longer than with all steps.
        if seconds is None and self._key.threshold is not None:
            full = CostKey("classify", steps)
            seconds = self._cost.call_s(full, rows, length)
        return 0.0 if seconds is None else seconds * self._cost.caution

    def row_s(self, steps: int, length: int) -> float:
        """The share of one row in a usual call."""
        rows = round(self._usual_rows)
        return self.call_s(steps, rows, round(length * self._usual_padding)) / rows

    def rows_s(self, steps: int, lengths: tuple[int, ...]) -> float:
        """The share of these rows in usual calls."""
        if len(lengths) == 1:
            return self.row_s(steps, lengths[0])
        return sum(self.row_s(steps, length) * many for length, many in Counter(lengths).items())

    def usual_s(self, steps: int) -> float:
        """The cost of a usual call."""
        return self.call_s(steps, round(self._usual_rows), round(self._usual_tokens))

    def enough_rows(self, steps: int, length: int) -> int:
        """The smallest batch with nearly the throughput of a full one.

        Larger batches would only wait longer.
        """
        if not self._cost.knows_well(self._cost_key_of(steps)):
            return self._max_rows
        each_s = self.call_s(steps, self._max_rows, length) / self._max_rows
        rows = 1
        while rows < self._max_rows and self.call_s(steps, rows, length) / rows > _NEARLY * each_s:
            rows *= 2
        return min(rows, self._max_rows)

    def share(self, steps: int, full: int) -> float:
        """The cost of a usual row at these steps, relative to full steps."""
        length = round(self._usual_tokens)
        whole = self.row_s(full, length)
        return self.row_s(steps, length) / whole if whole > 0 else steps / full

    def _cost_key_of(self, steps: int) -> CostKey:
        return self._cost_keys.setdefault(steps, CostKey("classify", steps, self._key.threshold))
