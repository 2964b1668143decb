// The dial: how much work an answer gets, set by steps, by a deadline, or by agreement with all
// steps; and what is expected of it. Knows the ladder and its predictions; sends nothing.

import * as deadline from "./deadline.js";
import * as format from "./format.js";
import { createHops } from "./hops.js";
import { element, make } from "./shape.js";

const METHOD_NAMES = { euler: "Euler", midpoint: "midpoint", heun: "Heun", ab2: "Adams–Bashforth", rk4: "Runge–Kutta 4" };
const WAYS = ["steps", "deadline", "agreement"];
const CROWDED_RUNGS = 8;
const CLOSE_SHARE = 0.045;
const USUAL_LEVEL = 0.005;

const latencyOf = (rung) => rung.predicted_ms ?? rung.latency_ms ?? null;

// Predictions come from whatever was sent last; only measurements compare rungs on equal inputs.
const comparableOf = (rung) => rung.latency_ms ?? rung.predicted_ms ?? null;

/** `onTurn` runs when the reader sets something else; `callsOf()` says how many calls an answer takes. */
export function createDial(onTurn, callsOf) {
  const hops = createHops();
  const [range, time, agreement] = [element("steps"), element("deadline"), element("agreement")];
  const radios = [...element("ways").querySelectorAll("input")];
  let [ladder, levels, task] = [{ metric: "", rungs: [] }, [], "classify"];
  let [way, index, deadlineMs, level, span] = ["steps", 0, null, 0, null];
  let settled = false; // whether the deadline was seen: until then it follows its scale
  let taken = null; // by the last answer, until the dial is turned

  const rungs = () => ladder.rungs;
  const full = () => rungs().at(-1);

  range.addEventListener("input", () => choose(Number(range.value)));
  time.addEventListener("input", () => turn(() => { deadlineMs = deadline.timeAt(span, Number(time.value)); }));
  agreement.addEventListener("input", () => turn(() => { level = Number(agreement.value); }));
  for (const radio of radios) radio.addEventListener("change", () => turn(() => { way = radio.value; }));

  function turn(change) {
    taken = null;
    change();
    show();
    onTurn();
  }

  /** Turn to a rung: by the slider, its scale, or a point of the plot. */
  function choose(next) {
    if (way === "steps" && next === index) return;
    turn(() => { [way, index] = ["steps", next]; });
  }

  function load(newLadder, newTask, newLevels, wanted = {}) {
    [ladder, task, levels, span, taken] = [newLadder, newTask, [...newLevels].sort((a, b) => a - b), null, null];
    const steps = rungs().findIndex((rung) => rung.steps === (wanted.steps ?? ladder.default_steps));
    index = steps >= 0 ? steps : rungs().length - 1;
    const near = levels.findLastIndex((one) => one <= (wanted.level ?? USUAL_LEVEL));
    level = Math.max(0, near);
    deadlineMs = wanted.deadlineMs ?? null;
    settled = deadlineMs !== null;
    element("way-agreement").hidden = !levels.length;
    if (WAYS.includes(wanted.way)) way = wanted.way;
    if (way === "agreement" && !levels.length) way = "steps";
    range.max = String(rungs().length - 1);
    range.disabled = rungs().length < 2;
    agreement.max = String(Math.max(0, levels.length - 1));
    element("scale").classList.toggle("crowded", rungs().length > CROWDED_RUNGS);
    element("scale").replaceChildren(...rungs().map((rung, at) =>
      notch(String(rung.steps), rung.effort ?? "", at / Math.max(1, rungs().length - 1), () => choose(at))));
    element("agreement-scale").replaceChildren(...levels.map((one, at) =>
      notch(format.percent(one), "", at / Math.max(1, levels.length - 1), () => turn(() => { level = at; }))));
    show();
  }

  function notch(name, note, share, onClick) {
    const item = make("button", { type: "button", tabIndex: -1, className: note ? "" : "unnamed" },
      make("b", { text: name }), make("span", { text: note }));
    item.style.setProperty("--at", share);
    item.addEventListener("click", onClick);
    return item;
  }

  /** The same rungs with newer predictions, or as the form has changed. */
  function renew(newLadder = ladder) {
    ladder = newLadder;
    show();
  }

  /** The rung that is set, or that would be picked; null where none would be in time. */
  function rung() {
    if (way === "steps") return rungs()[index];
    if (way === "agreement") return full();
    return rungs()[deadline.pick(ladder, callsOf(), deadlineMs)] ?? null;
  }

  function show() {
    for (const radio of radios) radio.checked = radio.value === way;
    for (const one of WAYS) element(`control-${one}`).hidden = one !== way;
    span = deadline.rangeFor(ladder, callsOf(), span);
    if (span && !settled) deadlineMs = deadline.timeAt(span, 85);
    settled ||= way === "deadline";
    deadlineMs ??= 1000;
    const chosen = rung();
    place(range, index / Math.max(1, rungs().length - 1), index);
    place(agreement, level / Math.max(1, levels.length - 1), level);
    mark(element("scale"), (at) => at === index);
    mark(element("agreement-scale"), (at) => at === level);
    showTimes(chosen);
    showReadout(chosen);
    range.setAttribute("aria-valuetext", spoken(rungs()[index]));
    agreement.setAttribute("aria-valuetext", levels.length ? `at most ${format.percent(levels[level])} differ` : "");
    showHops(chosen);
  }

  function showHops(chosen) {
    if (way === "agreement") hops.show(full().steps, taken ?? full().steps);
    else hops.show(chosen?.steps ?? full().steps, chosen?.steps ?? 0);
  }

  function place(control, share, value) {
    control.value = String(value);
    control.style.setProperty("--fill", share);
  }

  const mark = (scale, isOn) => [...scale.children].forEach((item, at) => item.classList.toggle("on", isOn(at)));

  /** The scale of deadlines: where each rung begins to be in time. */
  function showTimes(chosen) {
    time.disabled = !span;
    if (!span) return;
    const at = deadline.positionOf(span, deadlineMs);
    place(time, at / 100, at);
    const picked = chosen ? `${format.stepsWord(chosen.steps)} picked` : "too short for any step count";
    time.setAttribute("aria-valuetext", `${format.duration(deadlineMs)}, ${picked}`);
    let shown = -1;
    const marks = rungs().map((one) => ({ one, ms: deadline.wholeMs(ladder, one, callsOf()) })).filter(({ ms }) => ms !== null)
      .sort((a, b) => b.ms - a.ms).map(({ one, ms }) => {
        const share = deadline.shareOf(span, ms);
        const crowded = shown >= 0 && shown - share < CLOSE_SHARE;
        if (!crowded) shown = share;
        const item = notch(crowded ? "" : String(one.steps), "", share, () => turn(() => { deadlineMs = Number((ms * 1.02).toPrecision(3)); }));
        item.classList.toggle("on", way === "deadline" && one === chosen);
        return item;
      });
    const ends = [[format.duration(span.lowMs), 0], [format.duration(span.highMs), 1]].map(([text, share]) => {
      const end = make("span", { className: "end", text });
      end.style.setProperty("--at", share);
      return end;
    });
    element("deadline-scale").replaceChildren(...ends, ...marks);
  }

  function showReadout(chosen) {
    const { metric } = ladder;
    const most = way === "agreement";
    const latency = chosen && latencyOf(chosen);
    element("count").textContent = chosen?.steps ?? "–";
    element("count-unit").textContent = chosen?.steps === 1 ? "step" : "steps";
    element("count-note").textContent = countNote(chosen);
    element("quality-name").textContent = `Expected ${metric || "quality"}`;
    element("quality").textContent = chosen?.quality ? format.quality(metric, chosen.quality.value) : "–";
    element("quality-interval").textContent = chosen?.quality ? format.interval(metric, chosen.quality.low, chosen.quality.high) : "not measured";
    element("latency").textContent = format.milliseconds(latency);
    element("latency-note").textContent = chosen ? `${most ? "at most, " : ""}${latencyNote(chosen)}` : "no step count is in time";
    element("evaluations").textContent = chosen?.nfe ?? "–";
    element("method").textContent = chosen ? `${most ? "at most, " : ""}${METHOD_NAMES[chosen.method] ?? chosen.method}` : "";
    element("trade").textContent = trade(chosen);
  }

  function countNote(chosen) {
    if (way === "agreement") return taken === null ? "at most" : `at most; last took ${taken}`;
    if (way === "deadline") return `within ${format.duration(deadlineMs)}`;
    return chosen.effort ? `${chosen.effort} effort` : "";
  }

  function latencyNote(chosen) {
    if (latencyOf(chosen) === null) return "not measured here";
    return `${task === "generate" ? "per token" : "per input"}, ${chosen.predicted_ms == null ? "measured" : "predicted"}`;
  }

  function trade(chosen) {
    if (way === "steps") return format.trade(ladder.metric, chosen, full(), comparableOf);
    if (way === "agreement") {
      return `The server stops as soon as it is sure of the answer; at most ${format.percent(levels[level])} of answers differ from those of ${format.stepsWord(full().steps)}.`;
    }
    if (!span) return "Nothing is known yet of how long an answer takes here: send a request, then set a deadline.";
    const answer = callsOf() > 1 ? `${format.count(callsOf())} tokens` : "the answer";
    if (!chosen) {
      const least = format.stepsWord(rungs()[0].steps);
      return `Not even ${least} would have ${answer} ready within ${format.duration(deadlineMs)} under the present load: the server would refuse.`;
    }
    const last = taken === null ? "The server keeps a margin." : `The last answer took ${format.stepsWord(taken)}.`;
    const ready = format.milliseconds(deadline.wholeMs(ladder, chosen, callsOf()));
    return `Under the present load, ${format.stepsWord(chosen.steps)} would have ${answer} ready within ${ready}. ${last}`;
  }

  function spoken(chosen) {
    const parts = [format.stepsWord(chosen.steps)];
    if (chosen.effort) parts.push(`${chosen.effort} effort`);
    if (chosen.quality) parts.push(`${ladder.metric} ${format.quality(ladder.metric, chosen.quality.value)}`);
    if (latencyOf(chosen) !== null) parts.push(format.milliseconds(latencyOf(chosen)));
    return parts.join(", ");
  }

  /** The field of the budget that is sent. */
  function budget() {
    if (way === "deadline") return { deadline_ms: deadlineMs };
    if (way === "agreement") return { max_disagreement: levels[level] };
    return { steps: rungs()[index].steps };
  }

  /** What a link keeps of it. */
  const state = () => ({ way, steps: rungs()[index].steps, deadlineMs, level: levels[level] });

  /** An answer came after so many steps. */
  function answered(steps) {
    taken = steps;
    showHops(rung());
    element("count-note").textContent = rung() ? countNote(rung()) : "";
    element("trade").textContent = trade(rung());
  }

  return { load, renew, choose, rung, budget, state, answered, way: () => way, deadlineMs: () => deadlineMs };
}
