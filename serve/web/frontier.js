// The frontier plot: quality against the latency of this server as it is now, a point with its
// interval for every rung, and faintly where the bundle was measured. Knows the ladder; sends nothing.

import * as format from "./format.js";
import { boxAround, placeNames } from "./names.js";
import { costAxis, linearTicks, logTicks, scalesOf } from "./scales.js";
import { set, shape } from "./shape.js";

const [MARK_PX, HALO_PX, GHOST_PX] = [6, 11.5, 3.5];

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
    moveNames(scales, width);
  }

  function newPoint(at) {
    const group = shape("g", { tabindex: 0, role: "button", "data-index": at });
    group.append(...["drift", "whisker"].map((name) => shape("path", { class: name })),
      shape("circle", { class: "ghost", r: GHOST_PX }), shape("circle", { class: "hit", r: 18 }),
      shape("circle", { class: "halo", r: HALO_PX }), shape("circle", { class: "mark", r: MARK_PX }), shape("text", { class: "name" }));
    group.addEventListener("click", () => onSelect(at));
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      onSelect(at);
    });
    return group;
  }

  function movePoint(group, rung, at, { axis, x, y }) {
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
    part("name").textContent = on ? format.stepsWord(rung.steps) : rung.steps;
  }

  /** The chosen one stands where it likes best; the others make room. */
  function moveNames({ axis, x, y, inner }, width) {
    const { rungs } = view.ladder;
    const taken = rungs.filter(axis.ghostOf).map((rung) => boxAround(x(axis.ghostOf(rung)), y(rung), GHOST_PX));
    for (const text of back.querySelectorAll(".limit-name")) {
      const box = text.getBBox();
      taken.push({ left: box.x, right: box.x + box.width, top: box.y, bottom: box.y + box.height });
    }
    const order = rungs.map((_, at) => at).sort((a, b) => (b === view.index) - (a === view.index));
    const names = order.map((at) => points.children[at].querySelector(".name"));
    const named = order.map((at, i) => ({
      x: x(axis.of(rungs[at])), y: y(rungs[at]),
      radius: (at === view.index ? HALO_PX : MARK_PX) + 1, width: names[i].getComputedTextLength(),
    }));
    const places = placeNames(named, { left: inner.left, right: width, top: inner.top - 10, bottom: inner.bottom }, taken);
    places.forEach(({ x, y, anchor }, i) => set(names[i], { x, y, "text-anchor": anchor }));
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
  const note = `${name} on held-out data${format.isLowerBetter(ladder.metric) ? " (lower is better)" : ""}`;
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
