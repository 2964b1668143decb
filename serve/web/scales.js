// The scales of the frontier plot: where costs and qualities stand, and which values are named.
// Pure: knows the ladder; draws nothing.

import * as format from "./format.js";

const MARGIN = { top: 24, right: 38, bottom: 44, left: 52 };

const nowOf = (rung) => (rung.predicted_ms > 0 ? rung.predicted_ms : null);
const measuredOf = (rung) => (rung.latency_ms > 0 ? rung.latency_ms : null);

/** The axis of cost: latency, live where the server knows it, else velocity evaluations. */
export function costAxis(ladder, task) {
  if (ladder.rungs.every((rung) => nowOf(rung) ?? measuredOf(rung))) {
    const name = `Milliseconds per ${task === "generate" ? "token" : "input"}, logarithmic scale`;
    return { of: (rung) => nowOf(rung) ?? measuredOf(rung), ghostOf: (rung) => nowOf(rung) && measuredOf(rung), isTime: true, name };
  }
  return { of: (rung) => rung.nfe, ghostOf: () => null, isTime: false, name: "Velocity evaluations (latency not known yet)" };
}

export function scalesOf({ ladder, task }, width, height) {
  const axis = costAxis(ladder, task);
  const costs = ladder.rungs.flatMap((rung) => [axis.of(rung), axis.ghostOf(rung)]).filter((cost) => cost !== null);
  const [least, most] = [Math.min(...costs), Math.max(...costs)];
  const spread = Math.max(Math.log(most / least), 0.7);
  const centre = (Math.log(most) + Math.log(least)) / 2;
  const [from, to] = [centre - 0.56 * spread, centre + 0.56 * spread];
  const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const x = (cost) => inner.left + ((Math.log(cost) - from) / (to - from)) * (inner.right - inner.left);

  const values = ladder.rungs.filter((rung) => rung.quality)
    .flatMap(({ quality }) => [quality.value, quality.low ?? quality.value, quality.high ?? quality.value]);
  let [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  const pad = (high - low) * 0.1 || Math.abs(high) * 0.02 || 0.5;
  [low, high] = [low - pad, high + pad];
  const down = format.isLowerBetter(ladder.metric);
  const place = (value) => {
    const share = (value - low) / (high - low);
    return down ? inner.top + share * (inner.bottom - inner.top) : inner.bottom - share * (inner.bottom - inner.top);
  };
  const y = (rung, which = "value") => place(rung.quality ? rung.quality[which] : low + pad);
  return { axis, x, y, place, inner, costRange: [Math.exp(from), Math.exp(to)], qualityRange: [low, high] };
}

export function logTicks([low, high], leads = [1, 2, 5]) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const lead of leads) {
      const tick = Number((lead * 10 ** power).toPrecision(3));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks.length < 3 && leads.length === 3 ? logTicks([low, high], [1, 1.5, 2, 3, 5, 7]) : ticks;
}

export function linearTicks([low, high], wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((lead) => lead * power).find((size) => size >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i += 1) ticks.push(i * step);
  if (ticks.length < 3 && wanted < 8) return linearTicks([low, high], 2 * wanted);
  return { ticks, step };
}
