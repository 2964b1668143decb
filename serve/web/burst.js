// An overload to try: the same burst of inputs twice, at all steps and then with a deadline.
// Small enough that other callers of the server hardly notice it.

import * as api from "./api.js";
import * as format from "./format.js";
import { writes } from "./form.js";
import { element, make } from "./shape.js";

const REQUESTS = 6; // what a browser sends to one host at once
const MOST_INPUTS = 30; // of one request
const USUAL_MS = 800; // how long the burst is meant to take at all steps
const DEADLINE_SHARE = 1 / 2; // of the time that all steps took
const TOKENS = 40;
const TOO_MUCH = [413, 422]; // too many bytes, or too many inputs, for one request

/** `now()` is {model, ladder, form}; `onEnd` runs when both bursts are answered. */
export function createBurst(now, onEnd) {
  const [button, about, status, table] = ["burst-send", "burst-about", "burst-status", "burst-table"].map(element);
  let running = null;

  let most = MOST_INPUTS; // that this server takes in one request, as far as is known

  /** Make ready for a model; one with a single step count has nothing to show. */
  function load() {
    running?.abort();
    most = MOST_INPUTS;
    describe();
    status.textContent = "";
    table.replaceChildren();
  }

  function describe() {
    const { model, ladder } = now();
    element("burst").hidden = ladder.rungs.length < 2;
    const what = writes(model) ? `${REQUESTS} texts of ${TOKENS} tokens` : `${REQUESTS * inputsEach()} copies of the input`;
    about.textContent = `Sends ${what} at once: first at ${format.stepsWord(ladder.full_steps)} each, then with a deadline of half the time that this took. Under the deadline the server chooses the steps.`;
  }

  function inputsEach() {
    const { model, ladder } = now();
    if (writes(model)) return 1;
    const full = ladder.rungs.at(-1);
    const ms = full.latency_ms ?? full.predicted_ms ?? 10;
    return Math.max(1, Math.min(most, Math.round(USUAL_MS / (REQUESTS * ms))));
  }

  async function send() {
    if (running) return;
    const { form, ladder } = now();
    const { body } = form.request({}); // of both bursts, whatever is typed meanwhile
    if (!form.hasInput()) {
      status.textContent = "It needs an input above.";
      return;
    }
    running = new AbortController();
    const { signal } = running;
    button.setAttribute("aria-disabled", "true");
    table.replaceChildren();
    try {
      status.textContent = `At ${format.stepsWord(ladder.full_steps)} …`;
      let inputs = inputsEach();
      let fixed = await burst({ ...body, steps: ladder.full_steps }, inputs, signal);
      while (inputs > 1 && fixed.every(({ failure }) => TOO_MUCH.includes(failure?.status))) {
        most = Math.floor(inputs / 2);
        describe();
        inputs = inputsEach();
        fixed = await burst({ ...body, steps: ladder.full_steps }, inputs, signal);
      }
      const slowestMs = Math.max(...fixed.map(({ ms }) => ms ?? 0));
      if (!slowestMs) throw fixed[0].failure;
      const deadlineMs = Math.max(1, Number((slowestMs * DEADLINE_SHARE).toPrecision(2)));
      status.textContent = `With a deadline of ${format.duration(deadlineMs)} …`;
      const chosen = await burst({ ...body, deadline_ms: deadlineMs }, inputs, signal);
      show([[`All ${format.stepsWord(ladder.full_steps)}`, fixed], ["The server chooses", chosen]], deadlineMs);
    } catch (failure) {
      if (failure.name === "AbortError") return;
      status.textContent = `${failure.title ?? "It failed"}. ${failure.message}`;
      if (failure.name !== "RequestFailure") throw failure;
    } finally {
      running = null;
      button.removeAttribute("aria-disabled");
      onEnd();
    }
  }

  /** All requests of one burst at once: {inputs, ms, budgets} of each, or {inputs, failure}. */
  function burst(body, inputs, signal) {
    const { model } = now();
    const bodies = writes(model) ? { ...body, stream: false, max_tokens: TOKENS } : { ...body, input: Array(inputs).fill(body.input) };
    return Promise.all(Array.from({ length: REQUESTS }, async () => {
      try {
        const answer = await (writes(model) ? api.write(bodies, signal) : api.classify(bodies, signal));
        return { inputs, ms: answer.timing.total_ms, budgets: answer.results?.map((result) => result.budget) ?? [answer.budget] };
      } catch (failure) {
        if (failure.name !== "RequestFailure") throw failure;
        return { inputs, failure };
      }
    }));
  }

  function show(bursts, deadlineMs) {
    const { ladder: { metric } } = now();
    const names = ["Steps", `In time (${format.duration(deadlineMs)})`, "Refused", "Slowest", "Steps taken", `Expected ${metric}`];
    const node = make("table");
    Object.assign(node.createCaption(), { className: "unseen", textContent: "The same burst, with and without a deadline" });
    node.createTHead().insertRow().append(...names.map((text) => make("th", { scope: "col", text })));
    const body = node.createTBody();
    const rows = bursts.map(([name, answers]) => summary(name, answers, deadlineMs, metric));
    for (const row of rows) body.insertRow().append(...row.cells.map((text) => make("td", { text })));
    table.replaceChildren(node);
    status.textContent = `In time: ${rows[0].inTime} of ${rows[0].all} at a fixed step count, ${rows[1].inTime} of ${rows[1].all} with the deadline.`;
  }

  button.addEventListener("click", send);
  return { load };
}

function summary(name, answers, deadlineMs, metric) {
  const sum = (list) => list.reduce((total, { inputs }) => total + inputs, 0);
  const done = answers.filter(({ failure }) => !failure);
  const all = sum(answers);
  const inTime = sum(done.filter(({ ms }) => ms <= deadlineMs));
  const budgets = done.flatMap(({ budgets: each }) => each);
  const steps = budgets.map((budget) => budget.steps);
  const values = budgets.map(({ expected }) => expected?.value).filter(Number.isFinite);
  const mean = values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN;
  const [least, most] = [Math.min(...steps), Math.max(...steps)];
  const taken = !steps.length ? "–" : least === most ? String(least) : `${least} to ${most}`;
  const slowest = done.length ? format.milliseconds(Math.max(...done.map(({ ms }) => ms))) : "–";
  return { inTime, all, cells: [name, `${inTime} of ${all}`, String(all - sum(done)), slowest, taken, format.quality(metric, mean)] };
}
