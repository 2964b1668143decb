// One answer on the page: its steps and why so many, its text or labels, and its times.
// Sends one request and shows what comes; knows neither ladder nor history.

import * as api from "./api.js";
import * as format from "./format.js";
import { createGrid } from "./grid.js";
import { drawScores } from "./scores.js";
import { make } from "./shape.js";
import { createTokens } from "./tokens.js";

const MOST_PIPS = 16;
const MOST_LETTERS = 12;
const CUT = "The text was too long for the model: only a part of it was read.";

/** `head` stands in for the name of the pane, where the reader can choose in it. */
export function createPane(name, head) {
  const title = make("h3", {}, head ?? make("span", { text: name }));
  const pips = make("span", { className: "pips", ariaHidden: "true" });
  const why = make("p", { className: "why" });
  const text = make("div", { className: "text", dir: "auto", tabIndex: 0, role: "region", ariaLabel: `${name}: text` });
  const scores = make("ul", { className: "scores", ariaLabel: `${name}: scores` });
  const grid = createGrid(name);
  const timing = make("dl", { className: "timing" });
  const problem = make("p", { className: "problem" });
  const node = make("article", { className: "pane", ariaLabel: name }, make("header", {}, title, pips), why, text, scores, grid.node, problem, timing);
  const tokens = createTokens(text);
  let outcome = null;

  function clear(writes) {
    [text.hidden, scores.hidden, outcome] = [!writes, writes, null];
    tokens.clear();
    grid.clear();
    for (const part of [scores, timing, pips, why, problem]) part.replaceChildren();
  }

  function showTiming(pairs) {
    timing.replaceChildren(...pairs.map(([term, detail]) =>
      make("div", {}, make("dt", { text: term }), make("dd", { text: String(detail) }))));
  }

  function showBudget(budget, words) {
    const { steps, full_steps: full } = budget;
    const shown = full <= MOST_PIPS ? Array.from({ length: full }, (_, at) => make("i", { className: at < steps ? "on" : "" })) : [];
    pips.replaceChildren(...shown);
    why.replaceChildren(make("b", { text: stepsOf(budget) }), words ? `: ${words}` : "");
  }

  /** Sends an input to be labelled. */
  async function classify(request, signal) {
    const start = performance.now();
    const answer = await api.classify(request.body, signal);
    const roundTripMs = performance.now() - start;
    const [result] = answer.results;
    problem.replaceChildren(result.truncated ? CUT : "");
    scores.hidden = Boolean(result.tokens);
    if (result.tokens) grid.show(request.traces ? await traced(request, result, signal) : result);
    else drawScores(scores, result);
    showBudget(result.budget, reasonInWords(result.budget, request.body));
    showTiming([
      ["Server", format.milliseconds(answer.timing.total_ms)],
      ["Compute", format.milliseconds(answer.timing.compute_ms)],
      ["Round trip", format.milliseconds(roundTripMs)],
    ]);
    const said = result.tokens ? labelsOf(result) : labelOf(result);
    outcome = {
      budget: result.budget,
      steps: result.budget.steps,
      ms: answer.timing.total_ms,
      totalMs: answer.timing.total_ms,
      ...said,
      spoken: `${said.spoken}, ${stepsOf(result.budget)}, in ${format.milliseconds(answer.timing.total_ms)}`,
    };
    return outcome;
  }

  /** The same result with what each step read out: asked for apart, since that takes longer than the answer. */
  async function traced({ body }, result, signal) {
    const { model, input } = body;
    const budget = result.budget.reason === "disagreement" ? { max_disagreement: body.max_disagreement } : { steps: result.budget.steps };
    try {
      const [{ trace }] = (await api.classify({ model, input, ...budget, trace: true }, signal)).results;
      return { ...result, trace };
    } catch (failure) {
      if (failure.name !== "RequestFailure") throw failure;
      return result; // the answer is there; how it came to be is not
    }
  }

  /** Streams a text; `painted` runs whenever more of it is shown. */
  async function generate(request, fullSteps, signal, painted) {
    const { body } = request;
    clear(true);
    const clock = { startMs: performance.now(), firstMs: null, lastMs: null, count: 0 };
    tokens.start(request.translates ? `${body.prompt}\n` : body.prompt, fullSteps, () => {
      if (!outcome && clock.count) showTiming(running(clock));
      painted();
    });
    node.classList.add("streaming");
    try {
      const done = await follow(api.generate(body, signal), clock, fullSteps);
      outcome = finished(done, clock);
      showBudget(done.budget, reasonInWords(done.budget, body));
      showTiming(ended(done, clock));
      return outcome;
    } finally {
      tokens.paint();
      node.classList.remove("streaming");
    }
  }

  async function follow(stream, clock, fullSteps) {
    for await (const { event, data } of stream) {
      if (event === "error") throw new api.RequestFailure("The server stopped the text", data.error?.message ?? "It gave no reason.", data.error?.code);
      if (event === "done") return data;
      clock.lastMs = performance.now() - clock.startMs;
      if (!clock.count) {
        clock.firstMs = clock.lastMs;
        showBudget({ steps: data.steps, full_steps: fullSteps }, "");
      }
      clock.count += 1;
      tokens.add(data);
    }
    throw new Error("a stream ended without its last event");
  }

  const showProblem = (message) => problem.replaceChildren(message);

  return { node, title, tokens, clear, classify, generate, showProblem, outcome: () => outcome };
}

const labelOf = ({ label, score }) => ({
  label,
  answer: `${label}, ${(100 * score).toFixed(1)}\u00a0%`,
  spoken: `${label}, ${(100 * score).toFixed(1)} percent`,
});

function labelsOf({ tokens, text }) {
  const labels = tokens.map(({ label }) => label);
  const line = text ?? labels.join(" ");
  return {
    labels,
    answer: line.length > MOST_LETTERS ? `${line.slice(0, MOST_LETTERS)}…` : line,
    spoken: `${labels.length} labels`,
  };
}

const stepsOf = ({ steps, full_steps: full }) => `${steps} of ${format.stepsWord(full)}`;

function finished(done, clock) {
  return {
    budget: done.budget,
    steps: done.budget.steps,
    seed: done.seed,
    // A browser that was busy gets many tokens at once: only the server knows the time of each.
    ms: done.timing.compute_ms / done.usage.completion_tokens,
    firstMs: clock.firstMs,
    totalMs: done.timing.total_ms,
    spoken: `${done.usage.completion_tokens} tokens in ${format.milliseconds(done.timing.total_ms)}, each ${stepsOf(done.budget)}`,
  };
}

const running = (clock) => [
  ["First token", format.milliseconds(clock.firstMs)],
  ["Tokens/s", format.rate((1000 * clock.count) / clock.lastMs)],
  ["Tokens", clock.count],
  ["Total", format.milliseconds(clock.lastMs)],
];

const ended = (done, clock) => [
  ["First token", format.milliseconds(clock.firstMs)],
  ["Tokens/s", format.rate((1000 * done.usage.completion_tokens) / done.timing.compute_ms)],
  ["Tokens", done.usage.completion_tokens],
  ["Total", format.milliseconds(done.timing.total_ms)],
  ["Seed", done.seed],
  ["Ended by", done.finish_reason],
];

/** Why an answer got its steps, for a reader. */
function reasonInWords({ reason, steps, full_steps: full, max_disagreement: level }, body) {
  switch (reason) {
    case "exact":
      return "as asked.";
    case "effort":
      return `the effort ${body.effort}.`;
    case "deadline":
      return `the most that were predicted to make ${format.duration(body.deadline_ms)} (reason: deadline).`;
    case "load":
      return "fewer than usual, since much waited (reason: load).";
    case "disagreement":
      if (level === undefined) return "no certified level is this strict, so all were taken (reason: disagreement).";
      return [
        `${steps < full ? "sure enough to jump to the end" : "not sure before the end"}; at most ${format.percent(level)}`,
        `of such answers differ from those of ${format.stepsWord(full)} (reason: disagreement).`,
      ].join(" ");
    default:
      return `the default of the model (reason: ${reason}).`;
  }
}
