// The steps dial: a range control snapped to the rungs, and what is expected at the chosen one.
// Knows the ladder; sends nothing.

import * as format from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const element = (id) => document.getElementById(id);
const METHOD_NAMES = { euler: "Euler", midpoint: "midpoint", heun: "Heun", ab2: "Adams–Bashforth", rk4: "Runge–Kutta 4" };

const CROWDED_RUNGS = 8;

const latencyOf = (rung) => rung.predicted_ms ?? rung.latency_ms ?? null;

// Predictions come from whatever was sent last; only measurements compare rungs on equal inputs.
const comparableOf = (rung) => rung.latency_ms ?? rung.predicted_ms ?? null;

/** `onInput` runs at each new rung, by drag, key, or a click on the scale. */
export function createDial(onInput) {
  const range = element("steps");
  const scale = element("scale");
  let ladder = { metric: "", rungs: [] };
  let index = 0;

  range.addEventListener("input", () => choose(Number(range.value)));
  new ResizeObserver(() => ladder.rungs.length && drawHops(ladder.rungs[index].steps)).observe(element("hops"));

  function choose(next) {
    if (next === index) return;
    show(next);
    onInput(ladder.rungs[index]);
  }

  function load(newLadder, task, steps) {
    ladder = { ...newLadder, task };
    range.max = String(ladder.rungs.length - 1);
    range.disabled = ladder.rungs.length < 2;
    scale.classList.toggle("crowded", ladder.rungs.length > CROWDED_RUNGS);
    scale.replaceChildren(...ladder.rungs.map(notch));
    const wanted = ladder.rungs.findIndex((rung) => rung.steps === steps);
    show(wanted >= 0 ? wanted : ladder.rungs.length - 1);
  }

  function notch(rung, at) {
    const item = document.createElement("button");
    item.type = "button";
    item.tabIndex = -1;
    item.classList.toggle("unnamed", !rung.effort);
    item.style.setProperty("--at", ladder.rungs.length > 1 ? at / (ladder.rungs.length - 1) : 0);
    const steps = document.createElement("b");
    steps.textContent = rung.steps;
    const effort = document.createElement("span");
    effort.textContent = rung.effort ?? "";
    item.append(steps, effort);
    item.addEventListener("click", () => choose(at));
    return item;
  }

  function show(next) {
    index = next;
    const { metric, rungs, task } = ladder;
    const rung = rungs[index];
    const full = rungs[rungs.length - 1];
    const latency = latencyOf(rung);
    range.value = String(index);
    range.style.setProperty("--fill", rungs.length > 1 ? index / (rungs.length - 1) : 1);
    [...scale.children].forEach((item, at) => item.classList.toggle("on", at === index));

    element("count").textContent = rung.steps;
    element("count-unit").textContent = rung.steps === 1 ? "step" : "steps";
    element("effort").textContent = rung.effort ? `${rung.effort} effort` : "";
    element("quality-name").textContent = `Expected ${metric || "quality"}`;
    element("quality").textContent = rung.quality ? format.quality(metric, rung.quality.value) : "–";
    element("quality-interval").textContent = rung.quality ? format.interval(metric, rung.quality.low, rung.quality.high) : "not calibrated";
    element("latency").textContent = format.milliseconds(latency);
    element("latency-note").textContent = latencyNote(rung, task);
    element("evaluations").textContent = rung.nfe;
    element("method").textContent = `${METHOD_NAMES[rung.method] ?? rung.method}, ${rung.nfe / rung.steps} a step`;
    element("trade").textContent = format.trade(metric, rung, full, comparableOf);
    range.setAttribute("aria-valuetext", spoken(rung, metric, latency));
    drawHops(rung.steps);
  }

  /** The same rungs with newer predictions. */
  function renew(newLadder) {
    ladder = { ...newLadder, task: ladder.task };
    show(index);
  }

  return { load, renew, choose, rung: () => ladder.rungs[index], index: () => index };
}

function latencyNote(rung, task) {
  if (latencyOf(rung) === null) return "not measured here";
  return `a ${task === "generate" ? "token" : "input"}, ${rung.predicted_ms == null ? "measured" : "predicted"}`;
}

function spoken(rung, metric, latency) {
  const parts = [format.stepsWord(rung.steps)];
  if (rung.effort) parts.push(`${rung.effort} effort`);
  if (rung.quality) parts.push(`${metric} ${format.quality(metric, rung.quality.value)}`);
  if (latency !== null) parts.push(format.milliseconds(latency));
  return parts.join(", ");
}

/** The depth from input to output, crossed in as many hops as there are steps. */
function drawHops(steps) {
  const svg = element("hops");
  const { width, height } = svg.getBoundingClientRect();
  if (width < 40) return;
  const [left, right, ground] = [6, width - 6, height - 18];
  const hop = (right - left) / steps;
  const rise = Math.min(hop * 0.62, ground - 5);
  const path = Array.from({ length: steps }, (_, i) =>
    `M${left + i * hop} ${ground}q${hop / 2} ${-2 * rise} ${hop} 0`).join("");
  const shapes = [
    shape("path", { class: "ground", d: `M${left} ${ground}H${right}` }),
    shape("path", { class: "hop", d: path }),
    ...Array.from({ length: steps + 1 }, (_, i) =>
      shape("circle", { class: i % steps ? "stop" : "end", cx: left + i * hop, cy: ground, r: i % steps ? 2 : 3.5 })),
    shape("text", { x: 0, y: height - 1 }, "input"),
    shape("text", { x: width / 2, y: height - 1, "text-anchor": "middle" }, "depth"),
    shape("text", { x: width, y: height - 1, "text-anchor": "end" }, "output"),
  ];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...shapes);
}

export function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
