// The frontier plot: quality against the latency of this server as it is now, a point with its
// interval for every rung, and faintly where the bundle was measured. Knows the ladder; sends nothing.

import * as format from "./format.js";
import { costAxis, linearTicks, logTicks, scalesOf } from "./scales.js";
import { set, shape } from "./shape.js";

const NAME_ROOM_PX = 30;
const NEAR_PX = 72;

/** `onSelect(index)` runs when a point is clicked, or Enter or Space pressed on it. */
export function createFrontier(holder, onSelect) {
  const [back, points] = [shape("g", {}), shape("g", {})];
  const svg = shape("svg", { role: "group" });
  svg.append(back, points);
  holder.append(svg);
  let view = null;
  let drawnWidth = 0;
  // The height follows from the width: drawing inside the callback would resize what it observes.
  new ResizeObserver(() => {
    if (view && holder.clientWidth !== drawnWidth) requestAnimationFrame(draw);
  }).observe(holder);

  /** A view: {ladder, task, index (-1: none), deadlineMs (of one call, or null)}. */
  function update(newView) {
    view = newView;
    draw();
  }

  function draw() {
    const width = holder.clientWidth;
    const height = Math.max(240, Math.min(320, width * 0.58));
    if (width < 100) return;
    drawnWidth = width;
    set(svg, { viewBox: `0 0 ${width} ${height}`, height, "aria-label": `${view.ladder.metric || "quality"} against cost, one point for each number of steps` });
    const scales = scalesOf(view, width, height);
    back.replaceChildren(...grid(view, scales, width, height), ...limit(view, scales), ...line(view, scales));
    // Points stay the same elements, so that a new prediction takes no focus away.
    if (points.children.length !== view.ladder.rungs.length) points.replaceChildren(...view.ladder.rungs.map((_, at) => newPoint(at)));
    view.ladder.rungs.forEach((rung, at) => movePoint(points.children[at], rung, at, scales));
  }

  function newPoint(at) {
    const group = shape("g", { tabindex: 0, role: "button", "data-index": at });
    group.append(...["drift", "whisker"].map((name) => shape("path", { class: name })),
      shape("circle", { class: "ghost", r: 3.5 }), shape("circle", { class: "hit", r: 18 }),
      shape("circle", { class: "halo", r: 11.5 }), shape("circle", { class: "mark", r: 6 }), shape("text", { class: "name" }));
    group.addEventListener("click", () => onSelect(at));
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      onSelect(at);
    });
    return group;
  }

  function movePoint(group, rung, at, { axis, x, y, inner }) {
    const part = (name) => group.querySelector(`.${name}`);
    const { metric } = view.ladder;
    const [cx, cy, ghost] = [x(axis.of(rung)), y(rung), axis.ghostOf(rung)];
    const known = rung.quality ? `${metric} ${format.quality(metric, rung.quality.value)}` : "quality not measured";
    const cost = axis.isTime ? format.milliseconds(axis.of(rung)) : `${rung.nfe} evaluations`;
    const on = at === view.index;
    set(group, {
      class: `rung${on ? " on" : ""}${isLate(view, axis.of(rung)) ? " late" : ""}`,
      "aria-pressed": on, "aria-label": `${format.stepsWord(rung.steps)}: ${known}, ${cost}${ghost ? `, measured ${format.milliseconds(ghost)}` : ""}`,
    });
    for (const name of ["hit", "halo", "mark"]) set(part(name), { cx, cy });
    set(part("ghost"), { cx: ghost ? x(ghost) : cx, cy });
    set(part("drift"), { d: ghost ? `M${x(ghost)} ${cy}H${cx}` : "" });
    const spread = rung.quality && Number.isFinite(rung.quality.low);
    const [low, high] = spread ? [y(rung, "low"), y(rung, "high")] : [cy, cy];
    set(part("whisker"), { d: spread ? `M${cx} ${low}V${high}M${cx - 4} ${low}h8M${cx - 4} ${high}h8` : "" });
    const left = on && cx > inner.right - NAME_ROOM_PX;
    // The longer name goes below, where that of a neighbour would stand in it.
    const crowded = on && view.ladder.rungs.some((other) => x(axis.of(other)) > cx && x(axis.of(other)) - cx < NEAR_PX);
    set(part("name"), { x: left ? cx - 12 : cx + 12, y: crowded ? cy + 22 : cy - 11, "text-anchor": left ? "end" : "start" });
    part("name").textContent = on ? format.stepsWord(rung.steps) : rung.steps;
  }

  return { update, isTimed: () => costAxis(view.ladder, view.task).isTime };
}

const isLate = ({ deadlineMs }, cost) => deadlineMs !== null && cost > deadlineMs;

function grid({ ladder }, { axis, x, place, inner, costRange, qualityRange }, width, height) {
  const parts = [];
  const { ticks, step } = linearTicks(qualityRange, 4);
  const fraction = format.isFraction(ladder.metric);
  const digits = Math.max(0, -Math.floor(Math.log10(fraction ? step * 100 : step) + 1e-9));
  for (const tick of ticks) {
    const text = fraction ? `${(tick * 100).toFixed(digits)}%` : tick.toFixed(digits);
    parts.push(shape("path", { class: "rule", d: `M${inner.left} ${place(tick)}H${inner.right}` }));
    parts.push(shape("text", { class: "tick", x: inner.left - 10, y: place(tick) + 4, "text-anchor": "end" }, text));
  }
  for (const tick of logTicks(costRange)) {
    parts.push(shape("path", { class: "rule", d: `M${x(tick)} ${inner.bottom}v5` }));
    parts.push(shape("text", { class: "tick", x: x(tick), y: inner.bottom + 19, "text-anchor": "middle" }, tick));
  }
  parts.push(shape("path", { class: "base", d: `M${inner.left} ${inner.bottom}H${inner.right}` }));
  const name = format.sentence(ladder.metric || "quality");
  const note = format.isLowerBetter(ladder.metric) ? `${name} (less is better)` : name;
  parts.push(shape("text", { class: "axis", x: 0, y: 11 }, note));
  parts.push(shape("text", { class: "axis", x: inner.right, y: height - 4, "text-anchor": "end" }, axis.name));
  return parts;
}

/** Where the deadline stands, if it is on the plot: what is right of it comes too late. */
function limit({ deadlineMs }, { axis, x, inner, costRange }) {
  if (deadlineMs === null || !axis.isTime || deadlineMs < costRange[0] || deadlineMs > costRange[1]) return [];
  const at = x(deadlineMs);
  const left = at > inner.right - 70;
  return [
    shape("rect", { class: "too-late", x: at, y: inner.top, width: Math.max(0, inner.right - at), height: inner.bottom - inner.top }),
    shape("path", { class: "limit", d: `M${at} ${inner.top}V${inner.bottom}` }),
    shape("text", { class: "limit-name", x: left ? at - 6 : at + 6, y: inner.bottom - 8, "text-anchor": left ? "end" : "start" }, "deadline"),
  ];
}

function line({ ladder }, { axis, x, y }) {
  const d = ladder.rungs.map((rung, at) => `${at ? "L" : "M"}${x(axis.of(rung))} ${y(rung)}`).join("");
  return [shape("path", { class: "frontier", d })];
}
