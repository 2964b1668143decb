// Deadlines: the scale of their control, and which rung would be picked under the present load.
// Pure: knows predictions of rungs, and neither page nor server.

const POSITIONS = 100;
const BELOW_LEAST = 0.4;
const ABOVE_MOST = 5;
// Below this a machine that is busy with other things may keep nobody's deadline.
const LEAST_HIGH_MS = 1000;

const rounded = (value) => Number(value.toPrecision(2));

/** The shortest deadline of a whole answer at a rung, as predicted now; null where nothing is known. */
export function wholeMs(ladder, rung, calls) {
  const each = rung.predicted_ms ?? rung.latency_ms ?? null;
  return each === null ? null : each * calls * ladder.caution + ladder.answer_ms;
}

/** What a deadline leaves for one call. */
export const callMs = (ladder, calls, deadlineMs) => (deadlineMs - ladder.answer_ms) / (calls * ladder.caution);

/** The rung with the most steps that is predicted to be in time; -1 where none is. */
export function pick(ladder, calls, deadlineMs) {
  return ladder.rungs.findLastIndex((rung) => {
    const ms = wholeMs(ladder, rung, calls);
    return ms !== null && ms <= deadlineMs;
  });
}

/** The range of a control on which every rung is seen; kept while it still holds them all. */
export function rangeFor(ladder, calls, kept) {
  const times = ladder.rungs.map((rung) => wholeMs(ladder, rung, calls)).filter((ms) => ms !== null);
  if (!times.length) return null;
  const [least, most] = [Math.min(...times), Math.max(...times)];
  const fits = kept && kept.lowMs * 1.2 <= least && most * 1.5 <= kept.highMs && (most * 20 >= kept.highMs || kept.highMs === LEAST_HIGH_MS);
  return fits ? kept : { lowMs: rounded(least * BELOW_LEAST), highMs: rounded(Math.max(LEAST_HIGH_MS, most * ABOVE_MOST)) };
}

/** Where a time stands between the ends, from 0 to 1, in logarithms. */
export const shareOf = ({ lowMs, highMs }, ms) => Math.log(ms / lowMs) / Math.log(highMs / lowMs);

export const positionOf = (range, ms) => Math.round(POSITIONS * Math.min(1, Math.max(0, shareOf(range, ms))));

/** With three digits: with two, neighbouring positions may have the same time, and arrows would stop there. */
export const timeAt = ({ lowMs, highMs }, position) => Number((lowMs * (highMs / lowMs) ** (position / POSITIONS)).toPrecision(3));
