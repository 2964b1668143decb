// The frontier plot: quality against latency, a labelled point with its interval for every rung,
// and the latencies of this session as a second mark. Knows the ladder; sends nothing.

import { shape } from "./dial.js";
import * as format from "./format.js";

const MARGIN = { top: 22, right: 34, bottom: 42, left: 52 };

/** The axis of cost: measured latency where every rung has one, else velocity evaluations. */
export function costAxis(ladder, task) {
  if (ladder.rungs.every((rung) => rung.latency_ms > 0)) {
    return { of: (rung) => rung.latency_ms, isTime: true, name: task === "generate" ? "Milliseconds a token" : "Milliseconds" };
  }
  return { of: (rung) => rung.nfe, isTime: false, name: "Velocity evaluations (latency not measured yet)" };
}

function logTicks(low, high, leads = [1, 2, 5]) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const lead of leads) {
      const tick = lead * 10 ** power;
      if (tick >= low && tick <= high) ticks.push(Number(tick.toPrecision(3)));
    }
  }
  return ticks.length < 3 && leads.length === 3 ? logTicks(low, high, [1, 1.5, 2, 3, 5, 7]) : ticks;
}

function linearTicks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((lead) => lead * power).find((size) => size >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i += 1) ticks.push(i * step);
  if (ticks.length < 3 && wanted < 8) return linearTicks(low, high, 2 * wanted);
  return { ticks, step };
}

/** `onSelect(index)` runs when a point is clicked, or Enter or Space pressed on it. */
export function createFrontier(holder, onSelect) {
  const svg = shape("svg", { role: "group" });
  holder.append(svg);
  let view = null;
  let drawnWidth = 0;
  // The height follows from the width: drawing inside the callback would resize what it observes.
  new ResizeObserver(() => {
    if (view && holder.clientWidth !== drawnWidth) requestAnimationFrame(draw);
  }).observe(holder);

  function update(newView) {
    view = newView;
    draw();
  }

  function draw() {
    const width = holder.clientWidth;
    const height = Math.max(230, Math.min(300, width * 0.56));
    if (width < 100) return;
    drawnWidth = width;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-label", `${view.ladder.metric || "quality"} against cost, one point for each number of steps`);
    const focused = svg.contains(document.activeElement) ? document.activeElement.dataset.index : null;
    const scales = scalesOf(view, width, height);
    svg.replaceChildren(...grid(view, scales, width, height), ...line(view, scales),
      ...view.ladder.rungs.map((rung, at) => point(rung, at, scales)), ...liveMarks(view, scales));
    if (focused !== null) svg.querySelector(`[data-index="${focused}"]`)?.focus();
  }

  function point(rung, at, { x, y, axis }) {
    const metric = view.ladder.metric;
    const [cx, cy] = [x(axis.of(rung)), y(rung)];
    const known = rung.quality ? `${metric} ${format.quality(metric, rung.quality.value)}` : "quality not measured";
    const cost = axis.isTime ? format.milliseconds(axis.of(rung)) : `${rung.nfe} evaluations`;
    const own = view.live.get(rung.steps);
    const yours = own ? `, yours ${format.milliseconds(own.ms)} at the median of ${own.count}` : "";
    const group = shape("g", {
      class: at === view.index ? "rung on" : "rung", tabindex: 0, role: "button", "data-index": at,
      "aria-pressed": at === view.index, "aria-label": `${format.stepsWord(rung.steps)}: ${known}, ${cost}${yours}`,
    });
    if (rung.quality && Number.isFinite(rung.quality.low)) {
      const [low, high] = [y(rung, "low"), y(rung, "high")];
      group.append(shape("path", { class: "whisker", d: `M${cx} ${low}V${high}M${cx - 4} ${low}h8M${cx - 4} ${high}h8` }));
    }
    group.append(
      shape("circle", { class: "hit", cx, cy, r: 18 }),
      shape("circle", { class: "halo", cx, cy, r: 11 }),
      shape("circle", { class: "mark", cx, cy, r: 5.5 }),
      shape("text", { class: "name", x: cx + 11, y: cy - 10 }, at === view.index ? format.stepsWord(rung.steps) : rung.steps),
    );
    group.addEventListener("click", () => onSelect(at));
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      onSelect(at);
    });
    return group;
  }

  return { update };
}

function scalesOf({ ladder, task, live }, width, height) {
  const axis = costAxis(ladder, task);
  const costs = ladder.rungs.map(axis.of);
  if (axis.isTime) costs.push(...[...live.values()].map((entry) => entry.ms));
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

function grid({ ladder }, { axis, x, place, inner, costRange, qualityRange }, width, height) {
  const parts = [];
  const { ticks, step } = linearTicks(...qualityRange, 4);
  const fraction = format.isFraction(ladder.metric);
  const digits = Math.max(0, -Math.floor(Math.log10(fraction ? step * 100 : step) + 1e-9));
  for (const tick of ticks) {
    const text = fraction ? `${(tick * 100).toFixed(digits)}%` : tick.toFixed(digits);
    parts.push(shape("path", { class: "rule", d: `M${inner.left} ${place(tick)}H${inner.right}` }));
    parts.push(shape("text", { class: "tick", x: inner.left - 8, y: place(tick) + 4, "text-anchor": "end" }, text));
  }
  for (const tick of logTicks(...costRange)) {
    parts.push(shape("path", { class: "rule", d: `M${x(tick)} ${inner.bottom}v5` }));
    parts.push(shape("text", { class: "tick", x: x(tick), y: inner.bottom + 19, "text-anchor": "middle" }, tick));
  }
  parts.push(shape("path", { class: "base", d: `M${inner.left} ${inner.bottom}H${inner.right}` }));
  const name = format.sentence(ladder.metric || "quality");
  const note = format.isLowerBetter(ladder.metric) ? `${name} (less is better)` : name;
  parts.push(shape("text", { class: "axis", x: 0, y: 11 }, note));
  parts.push(shape("text", { class: "axis", x: width, y: height - 4, "text-anchor": "end" }, axis.name));
  return parts;
}

function line({ ladder }, { axis, x, y }) {
  const d = ladder.rungs.map((rung, at) => `${at ? "L" : "M"}${x(axis.of(rung))} ${y(rung)}`).join("");
  return [shape("path", { class: "frontier", d })];
}

function liveMarks({ ladder, live }, { axis, x, y }) {
  if (!axis.isTime) return [];
  return ladder.rungs.filter((rung) => live.has(rung.steps)).flatMap((rung) => {
    const [from, to, level] = [x(axis.of(rung)), x(live.get(rung.steps).ms), y(rung)];
    return [
      shape("path", { class: "drift", d: `M${from} ${level}H${to}` }),
      shape("path", { class: "live", d: `M${to} ${level - 6}l6 6l-6 6l-6 -6Z` }),
    ];
  });
}
