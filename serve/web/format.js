// Numbers as words: milliseconds, qualities and their differences. Knows no page and no server.

const LOWER_IS_BETTER = new Set(["loss", "perplexity", "error", "nll", "bits_per_character"]);

export const isLowerBetter = (metric) => LOWER_IS_BETTER.has(metric);

export const isFraction = (metric) => metric === "accuracy" || metric === "error" || metric === "f1";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function milliseconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 1995) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 99.5) return `${Math.round(value)} ms`;
  return `${value.toFixed(value >= 9.95 ? 1 : 2)} ms`;
}

/** A time that was chosen, not measured: without decimals that mean nothing. */
export function duration(ms) {
  if (ms >= 1000) return `${Number((ms / 1000).toPrecision(2))} s`;
  return `${Number(ms.toPrecision(2))} ms`;
}

/** A share as a percentage: 0.005 is "0.5 %". */
export const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;

export function rate(value) {
  if (!isNumber(value)) return "–";
  return value >= 99.5 ? String(Math.round(value)) : value.toFixed(1);
}

export function quality(metric, value) {
  if (!isNumber(value)) return "–";
  return isFraction(metric) ? `${(100 * value).toFixed(1)} %` : value.toFixed(3);
}

export function interval(metric, low, high) {
  if (!isNumber(low) || !isNumber(high)) return "";
  if (isFraction(metric)) return `${(100 * low).toFixed(1)} – ${(100 * high).toFixed(1)}`;
  return `${low.toFixed(3)} – ${high.toFixed(3)}`;
}

export const stepsWord = (steps) => (steps === 1 ? "1 step" : `${steps} steps`);

export const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

export const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });

function qualityDifference(metric, quality, full) {
  const change = quality.value - full.value;
  const [size, unit] = isFraction(metric) ? [100 * Math.abs(change), " points"] : [Math.abs(change), ""];
  const digits = isFraction(metric) ? 1 : 3;
  if (Number(size.toFixed(digits)) === 0) return `the same ${metric}`;
  const noise = quality.low <= full.high && full.low <= quality.high ? " (the intervals overlap)" : "";
  return `${size.toFixed(digits)}${unit} ${change > 0 ? "higher" : "lower"} ${metric}${noise}`;
}

/** What this rung buys and costs against the rung with the most steps, in one sentence. */
export function trade(metric, rung, full, latencyOf) {
  if (rung.steps === full.steps) return "The full depth: the other settings are measured against this one.";
  const parts = [];
  const [fast, slow] = [latencyOf(rung), latencyOf(full)];
  if (isNumber(fast) && isNumber(slow) && fast > 0) {
    parts.push(`${(slow / fast).toFixed(1)}× as fast`);
  } else {
    parts.push(`${(full.nfe / rung.nfe).toFixed(1)}× less work`);
  }
  if (rung.quality && full.quality) parts.push(qualityDifference(metric, rung.quality, full.quality));
  return `Against ${stepsWord(full.steps)}: ${parts.join(", ")}.`;
}

