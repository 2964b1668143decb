// Sending: one answer, two side by side, or one at every step count; and stopping them.
// Knows panes and requests; what the form and the dial say, it is told.

import { RequestFailure } from "./api.js";
import { createComparison, labelsInWords } from "./compare.js";
import * as format from "./format.js";
import { writes } from "./form.js";
import { createPane } from "./pane.js";
import { element, make } from "./shape.js";
import { drawShades } from "./tokens.js";

const MOST_SEED = 2 ** 31;
const SLOW_MS = 600;
const EXPLAINED = "One answer comes after the other, from one seed: what differs is due to the steps.";

/** `now()` is {model, ladder, form, dial}; `onOutcome` runs after each answer, `onEnd` after all. */
export function createRuns(now, onOutcome, onEnd) {
  const against = make("select", { id: "against", ariaLabel: "Steps of the second answer" });
  const first = createPane("First answer", "");
  const second = createPane("Second answer", against);
  let [running, sweeping, two, stopTimer] = [null, false, false, 0];
  against.addEventListener("change", () => {
    if (!writes(now().model)) return;
    running?.abort();
    second.clear(true); // its text is of other steps
    showShades();
    element("difference").textContent = EXPLAINED;
  });
  element("panes").append(first.node, second.node);
  second.node.hidden = true;

  /** Make ready for a model; `steps` are those of the second answer. */
  function load(ladder, steps) {
    const { rungs } = ladder;
    against.replaceChildren(...rungs.map((rung) => make("option", { value: String(rung.steps), text: format.stepsWord(rung.steps) })));
    const wanted = rungs.some((rung) => rung.steps === steps) ? steps : usualOther(ladder, now().model.default_steps);
    against.value = String(wanted);
    clear();
  }

  function clear() {
    const { model } = now();
    busy(false);
    for (const pane of [first, second]) pane.clear(writes(model));
    element("failure").hidden = true;
    element("difference").textContent = EXPLAINED;
    element("shades").hidden = !writes(model);
    showShades();
    reveal();
  }

  function setTwo(on) {
    two = on;
    second.node.hidden = element("difference").hidden = !on;
    element("columns").classList.toggle("two", on);
    showShades();
    element("difference").textContent = EXPLAINED;
    reveal();
  }

  /** Answers are hidden while there are none; two are shown at once, since the second has a choice. */
  function reveal() {
    element("answers").hidden = !two && !first.outcome() && !first.tokens.list().length;
  }

  function showShades() {
    const { model, ladder } = now();
    if (writes(model)) drawShades(element("shades-list"), ladder.rungs, shownPanes().map((pane) => pane.tokens.counts()));
  }

  const shownPanes = () => (two ? [first, second] : [first]);

  function busy(on) {
    const writing = writes(now().model);
    const isFocused = document.activeElement === element("stop");
    clearTimeout(stopTimer);
    element("stop").hidden = !on || (!writing && !sweeping);
    // Most labels come at once: a button that flashes would be in the way.
    if (on && element("stop").hidden) stopTimer = setTimeout(showStop, SLOW_MS);
    if (isFocused && element("stop").hidden) element("send").focus();
    element("send").setAttribute("aria-disabled", String(on && writing));
    element("sweep").setAttribute("aria-disabled", String(on && (sweeping || writing)));
    element("answers").setAttribute("aria-busy", String(on));
  }

  function showStop() {
    element("stop").hidden = false;
    element("status").textContent = "Waiting for the answer.";
  }

  function showFailure(failure) {
    element("failure-title").textContent = failure.title ?? "The page failed";
    element("failure-text").textContent = failure.message;
    element("failure-code").textContent = failure.code ?? "";
    element("failure").hidden = false;
  }

  /** Sends the form as it stands; false when it failed or was stopped. */
  async function send() {
    cancel();
    const control = new AbortController();
    running = control;
    busy(true);
    element("failure").hidden = true;
    const { model } = now();
    if (writes(model)) element("status").textContent = "Writing.";
    try {
      if (model.input.kind === "image" && !now().form.hasInput()) {
        throw new RequestFailure("There is no picture yet", "Draw in the square, or choose a file.");
      }
      element("status").textContent = await (two ? sendTwo(control.signal) : sendOne(control.signal));
      return true;
    } catch (failure) {
      if (failure.name === "AbortError") {
        if (running === control) element("status").textContent = "Stopped.";
        return false;
      }
      showFailure(failure);
      element("status").textContent = ""; // the failure speaks for itself
      // Text that came before the failure stays; labels of an earlier request would mislead.
      if (!writes(model)) first.clear(false);
      reveal();
      if (failure.name !== "RequestFailure") throw failure;
      return false;
    } finally {
      if (running === control) {
        running = null;
        busy(sweeping);
        onEnd();
      }
    }
  }

  async function sendOne(signal) {
    const { model, form, dial } = now();
    second.clear(writes(model)); // it was to another input
    return (await run(first, form.request(dial.budget()), signal, showShades)).spoken;
  }

  /** One after the other, so that neither slows the other, with one seed: only the steps differ. */
  async function sendTwo(signal) {
    const { model, form, dial } = now();
    const seed = Math.floor(Math.random() * MOST_SEED);
    const requests = [form.request(dial.budget(), seed), form.request({ steps: Number(against.value) }, seed)];
    const comparison = createComparison(first, second, requests[0].body.num_beams > 1);
    const painted = () => {
      comparison.update();
      element("difference").textContent = comparison.words();
      showShades();
    };
    for (const pane of [first, second]) pane.clear(writes(model));
    element("difference").textContent = "";
    const failures = [null, null];
    for (const [at, pane] of [first, second].entries()) {
      try {
        await run(pane, requests[at], signal, painted);
      } catch (failure) {
        if (failure.name === "AbortError") throw failure;
        failures[at] = failure;
      }
    }
    if (failures.every(Boolean)) throw failures[0];
    [first, second].forEach((pane, at) => failures[at] && pane.showProblem(`${failures[at].title ?? "It failed"}. ${failures[at].message}`));
    const words = writes(model) ? comparison.words() : labelsInWords(first, second);
    element("difference").textContent = words;
    return words || failures.find(Boolean).message;
  }

  /** Over the first answer: what it was made with, or else what it would be made with. */
  function name() {
    if (!running && !first.outcome() && !first.tokens.list().length) first.title.replaceChildren(now().name());
  }

  async function run(pane, request, signal, painted) {
    const { model, ladder, name: made } = now();
    if (pane === first) first.title.replaceChildren(made());
    const outcome = await (request.writes
      ? pane.generate(request, ladder.full_steps, signal, () => { reveal(); painted(); })
      : pane.classify(request, signal));
    reveal();
    onOutcome({ model, ladder, outcome, isFirst: pane === first });
    return outcome;
  }

  /** One answer after the other, at every rung of the ladder. */
  async function sweep() {
    sweeping = true;
    const { model, ladder, dial } = now();
    try {
      for (let index = 0; index < ladder.rungs.length && sweeping && now().model === model; index += 1) {
        dial.choose(index);
        if (!(await send())) break;
      }
    } finally {
      sweeping = false;
      busy(false);
    }
  }

  function cancel() {
    running?.abort();
    running = null;
  }

  function stop() {
    sweeping = false;
    running?.abort();
  }

  return {
    load, setTwo, send, sweep, cancel, stop, against,
    isTwo: () => two, isRunning: () => running !== null, isSweeping: () => sweeping, seed: () => first.outcome()?.seed, name, clear,
  };
}

/** The step count to set beside the default: the best one, else the one farthest from the default. */
function usualOther({ rungs, metric }, usual) {
  const down = format.isLowerBetter(metric);
  const known = rungs.filter(({ quality }) => quality);
  const best = known.reduce((a, b) => (a && (down ? a.quality.value <= b.quality.value : a.quality.value >= b.quality.value) ? a : b), null);
  const others = [best, rungs.at(-1), rungs[0]].filter(Boolean).map(({ steps }) => steps);
  return others.find((steps) => steps !== usual) ?? usual;
}
