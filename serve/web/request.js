// One request from the form to the answer on the page: bodies, streamed text, scores and timing.
// Knows the form and the answer; does not know the ladder or the history.

import * as api from "./api.js";
import * as format from "./format.js";

const element = (id) => document.getElementById(id);

const numberIn = (id) => {
  const value = element(id).value.trim();
  return value === "" ? undefined : Number(value);
};

const SHOWN_LABELS = 10;

/** Whether the model writes a text; else it labels what it is given. */
export const writes = (model) => model.task !== "classify";

function pointsIn(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text; // the server says what is wrong with it
  }
}

function inputOf(model, picture) {
  if (model.input.kind === "image") return { image: picture.dataUrl() };
  const text = element("input").value;
  return model.input.kind === "points" ? { points: pointsIn(text) } : text;
}

/** The request as the form and the picture stand: where it goes and its body. */
export function requestOf(model, steps, picture) {
  if (!writes(model)) {
    const topK = model.labels?.length ? { top_k: Math.min(model.labels.length, SHOWN_LABELS) } : {};
    return { path: "v1/classify", body: { model: model.id, input: inputOf(model, picture), steps, ...topK } };
  }
  const input = element("input").value;
  const beams = model.task === "translate" ? numberIn("beams") : undefined;
  const searches = beams > 1;
  const temperature = searches ? undefined : numberIn("temperature");
  const sampling = { max_tokens: numberIn("max-tokens"), temperature, num_beams: beams, seed: numberIn("seed") };
  const given = Object.fromEntries(Object.entries(sampling).filter(([, value]) => value !== undefined));
  return { path: "v1/generate", translates: model.task === "translate", body: { model: model.id, prompt: input, steps, ...given, stream: true } };
}

export function clearAnswer() {
  element("text").replaceChildren();
  element("scores").replaceChildren();
  element("timing").replaceChildren();
  element("failure").hidden = true;
  element("answer").classList.remove("filled");
}

export function showFailure(failure) {
  element("failure-title").textContent = failure.title ?? "The page failed";
  element("failure-text").textContent = failure.message;
  element("failure-code").textContent = failure.code ?? "";
  element("failure").hidden = false;
  // Text that came before the failure stays; labels of an earlier request would mislead.
  element("answer").classList.toggle("filled", element("text").textContent !== "");
}

function showTiming(pairs) {
  element("timing").replaceChildren(...pairs.map(([name, value]) => {
    const pair = document.createElement("div");
    const term = document.createElement("dt");
    const detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value;
    pair.append(term, detail);
    return pair;
  }));
}

/** Sends a text to be labelled; returns what the history keeps. */
export async function classify(request, signal) {
  const start = performance.now();
  const answer = await api.classify(request.body, signal);
  const roundTripMs = performance.now() - start;
  const [result] = answer.results;
  element("failure").hidden = true;
  element("answer").classList.add("filled");
  showScores(result);
  showTiming([
    ["Steps", result.budget.steps],
    ["Server", format.milliseconds(answer.timing.total_ms)],
    ["Compute", format.milliseconds(answer.timing.compute_ms)],
    ["Round trip", format.milliseconds(roundTripMs)],
  ]);
  return {
    budget: result.budget,
    ms: answer.timing.total_ms,
    answer: `${result.label} ${(100 * result.score).toFixed(0)} %`,
    spoken: `${result.label}, ${(100 * result.score).toFixed(1)} percent, in ${format.milliseconds(answer.timing.total_ms)}`,
  };
}

function showScores(result) {
  const list = element("scores");
  const top = result.top?.length ? result.top : [result];
  // The rows keep the order of the labels, so that bars move rather than jump while the dial turns.
  const order = [...list.children].map((row) => row.dataset.label);
  const known = top.length === order.length && top.every(({ label }) => order.includes(label));
  const rows = known ? order.map((label) => top.find((entry) => entry.label === label)) : top;
  if (!known) list.replaceChildren(...rows.map(scoreRow));
  rows.forEach(({ label, score }, at) => {
    const row = list.children[at];
    row.classList.toggle("best", label === result.label);
    row.querySelector("i").style.width = `${100 * score}%`;
    row.querySelector("b").textContent = `${(100 * score).toFixed(1)} %`;
  });
}

function scoreRow({ label }) {
  const row = document.createElement("li");
  row.dataset.label = label;
  const name = document.createElement("span");
  name.textContent = label;
  const track = document.createElement("u");
  track.append(document.createElement("i"));
  row.append(name, track, document.createElement("b"));
  return row;
}

/** Streams a generation into the page; returns what the history keeps. */
export async function generate(request, signal) {
  const text = element("text");
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = request.translates ? `${request.body.prompt}\n` : request.body.prompt;
  const grown = document.createElement("span");
  text.replaceChildren(prompt, grown);
  element("failure").hidden = true;
  element("answer").classList.add("filled", "streaming");
  element("answer").setAttribute("aria-busy", "true");
  const clock = { startMs: performance.now(), firstMs: null, lastMs: null, tokens: 0 };
  try {
    const done = await follow(api.generate(request.body, signal), createPainter(text, grown), clock);
    return { budget: done.budget, ms: tokenMs(done), firstMs: clock.firstMs, spoken: spokenEnd(clock, done) };
  } finally {
    if (text.contains(grown)) {
      element("answer").classList.remove("streaming");
      element("answer").setAttribute("aria-busy", "false");
      if (clock.tokens === 0) clearAnswer();
    }
  }
}

/** Shows text once a frame: drawing every token would slow down the stream that is being timed. */
function createPainter(text, grown) {
  let [letters, timing, frame] = ["", null, 0];
  const paint = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    if (!timing || !text.contains(grown)) return;
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    grown.append(letters);
    letters = "";
    if (atEnd) text.scrollTop = text.scrollHeight;
    showTiming(timing());
  };
  const add = (more, newTiming) => {
    letters += more;
    timing = newTiming;
    frame ||= requestAnimationFrame(paint);
  };
  return { add, paint };
}

async function follow(stream, painter, clock) {
  try {
    for await (const { event, data } of stream) {
      if (event === "error") {
        throw new api.RequestFailure("The server stopped the text", data.error?.message ?? "It gave no reason.", data.error?.code);
      }
      if (event === "done") {
        painter.add("", () => streamTiming(clock, data.budget.steps, data));
        return data;
      }
      clock.lastMs = performance.now() - clock.startMs;
      clock.firstMs ??= clock.lastMs;
      clock.tokens += 1;
      painter.add(data.text, () => streamTiming(clock, data.steps));
    }
  } finally {
    painter.paint();
  }
  throw new Error("a stream ended without its last event");
}

// A browser that was busy gets many tokens at once: only the server knows the time of each.
const tokenMs = (done) => done.timing.compute_ms / done.usage.completion_tokens;

function streamTiming(clock, steps, done) {
  const each = done ? tokenMs(done) : clock.lastMs / clock.tokens;
  const pairs = [
    ["Steps", steps],
    ["First token", format.milliseconds(clock.firstMs)],
    ["Tokens/s", format.rate(1000 / each)],
    ["Tokens", clock.tokens],
    ["Total", format.milliseconds(clock.lastMs)],
  ];
  return done ? [...pairs, ["Ended by", done.finish_reason]] : pairs;
}

const spokenEnd = (clock, done) =>
  `${clock.tokens} tokens in ${format.milliseconds(clock.lastMs)} at ${format.stepsWord(done.budget.steps)}`;
