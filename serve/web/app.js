// The playground: joins model, dial, form, plot and history. Knows when to send; not how.

import * as api from "./api.js";
import { createDial } from "./dial.js";
import * as format from "./format.js";
import { costAxis, createFrontier } from "./frontier.js";
import { createHistory } from "./history.js";
import { createPicture } from "./picture.js";
import * as request from "./request.js";

const RESEND_AFTER_MS = 160;
const RENEW_AFTER_MS = 2000;
const EXAMPLE_LETTERS = 46;
const SHORT_LETTERS = 14;
const VERBS = { classify: "Classify", generate: "Generate", translate: "Translate" };
const TITLES = { classify: "Text", generate: "Prompt", translate: "Text to translate" };
const INPUT_TITLES = { image: "Image", points: "Points: [[x, ...], ...]" };
const TEMPERATURES = { generate: "0.8", translate: "0" };

const element = (id) => document.getElementById(id);
const history = createHistory(element("history"));
const dial = createDial(turned);
const frontier = createFrontier(element("frontier"), (index) => dial.choose(index));
const picture = createPicture(element("canvas"), element("file"), element("wipe"), turned);
const drafts = new Map();

let model = null;
let ladder = null;
let running = null;
let sweeping = false;
let resendTimer = 0;
let openings = 0;
let ladderReadMs = 0;

window.addEventListener("error", (event) => reportFault(event.message || "A part of the page could not be loaded."));
window.addEventListener("unhandledrejection", (event) => reportFault(event.reason?.message ?? String(event.reason)));

function reportFault(message) {
  element("banner-text").textContent = `This page has hit an error: ${message}. Reload it; if it stays, please report it.`;
  element("banner").hidden = false;
}

function notice(title, text, retry) {
  element("notice-title").textContent = title;
  element("notice-text").textContent = text;
  element("notice-retry").hidden = !retry;
  element("notice-retry").onclick = retry;
  element("notice").hidden = false;
  element("playground").hidden = true;
}

async function start() {
  let models;
  try {
    models = await api.models();
  } catch (failure) {
    notice(failure.title ?? "The models could not be read", failure.message, start);
    return;
  }
  if (!models.length) {
    notice("This server has no models", "Start it with a bundle: stepdial serve BUNDLE. Without a bundle it serves the zoo.", start);
    return;
  }
  const buttons = models.map((entry, at) => modelButton(entry, at));
  element("models").replaceChildren(element("models").querySelector("legend"), ...buttons);
  element("models").hidden = false;
  await open(models[0]);
}

function modelButton(entry, at) {
  const label = document.createElement("label");
  const radio = document.createElement("input");
  radio.type = "radio";
  radio.name = "model";
  radio.value = entry.id;
  radio.checked = at === 0;
  radio.addEventListener("change", () => open(entry));
  const name = document.createElement("span");
  name.textContent = entry.id;
  label.append(radio, name);
  return label;
}

async function open(entry) {
  cancel();
  openings += 1;
  const opening = openings;
  let rungs;
  try {
    rungs = await api.ladder(entry.id);
  } catch (failure) {
    if (opening === openings) notice(failure.title ?? "The ladder could not be read", failure.message, () => open(entry));
    return;
  }
  if (opening !== openings) return;
  if (model) drafts.set(model.id, element("input").value);
  const before = model?.task;
  [model, ladder, ladderReadMs] = [entry, rungs, performance.now()];
  const writes = request.writes(model);
  const sees = model.input.kind === "image";
  const examples = (model.card?.examples ?? []).filter((example) => typeof example === "string");
  element("ask-title").textContent = element("input-label").textContent = INPUT_TITLES[model.input.kind] ?? TITLES[model.task];
  element("model-about").textContent = model.card?.title ?? model.card?.description ?? "";
  element("input").value = drafts.get(model.id) ?? examples[0] ?? "";
  element("input").hidden = sees;
  element("picture").hidden = !sees;
  if (sees) picture.load(model.input);
  element("examples").replaceChildren(...(examples.length > 1 && !sees ? examples.map(exampleButton) : []));
  element("options").hidden = !writes;
  element("beams-label").hidden = model.task !== "translate";
  if (writes && before !== model.task) element("temperature").value = TEMPERATURES[model.task];
  element("text").hidden = !writes;
  element("scores").hidden = writes;
  element("send").textContent = VERBS[model.task];
  element("about-server").textContent = describe(model);
  element("notice").hidden = true;
  element("playground").hidden = false;
  request.clearAnswer();
  dial.load(ladder, mode(), model.default_steps);
  refresh();
}

function describe({ id, task, precision, parameters, card }) {
  const parts = [id, task, precision, parameters && `${format.count(parameters)} parameters`, card?.license];
  return parts.filter(Boolean).join(" · ");
}

function exampleButton(example) {
  const button = document.createElement("button");
  button.type = "button";
  const line = example.replace(/\s+/g, " ").trim();
  button.textContent = line.length > EXAMPLE_LETTERS ? `${line.slice(0, EXAMPLE_LETTERS).trimEnd()}…` : line;
  button.classList.toggle("short", line.length <= SHORT_LETTERS);
  button.title = example;
  button.addEventListener("click", () => {
    element("input").value = example;
    refresh();
    if (!request.writes(model)) send();
  });
  return button;
}

/** What the dial, the plot and the table need to know of the task. */
const mode = () => (request.writes(model) ? "generate" : "classify");

const hasInput = () => (model.input.kind === "image" ? picture.isDrawn() : element("input").value.trim() !== "");

function refresh() {
  const { path, body } = request.requestOf(model, dial.rung().steps, picture);
  element("curl").textContent = api.curl(path, body);
  const live = history.live(model.id);
  frontier.update({ ladder, task: mode(), index: dial.index(), live });
  history.draw(model.id, mode(), ladder.metric);
  element("clear").hidden = history.size(model.id) === 0;
  const timed = costAxis(ladder, mode()).isTime;
  element("frontier-title").textContent = timed ? "Quality against latency" : "Quality against work";
  element("legend-live").hidden = !timed;
}

function turned() {
  refresh();
  if (request.writes(model) || sweeping || !hasInput()) return;
  clearTimeout(resendTimer);
  resendTimer = setTimeout(send, RESEND_AFTER_MS);
}

function cancel() {
  clearTimeout(resendTimer);
  running?.abort();
  running = null;
}

function busy(on) {
  const writes = request.writes(model);
  element("stop").hidden = !on || (!writes && !sweeping);
  element("send").setAttribute("aria-disabled", String(on && writes));
  element("sweep").setAttribute("aria-disabled", String(on && (sweeping || writes)));
}

/** Sends the form at the rung of the dial; false when it failed or was stopped. */
async function send() {
  cancel();
  const control = new AbortController();
  const [sentModel, sentLadder, rung] = [model, ladder, dial.rung()];
  running = control;
  busy(true);
  const run = request.writes(sentModel) ? request.generate : request.classify;
  try {
    const outcome = await run(request.requestOf(sentModel, rung.steps, picture), control.signal);
    const { budget, spoken, ...measured } = outcome;
    const quality = budget?.expected?.value ?? rung.quality?.value;
    history.add(sentModel.id, { steps: budget?.steps ?? rung.steps, metric: sentLadder.metric, quality, ...measured });
    element("status").textContent = spoken;
    return true;
  } catch (failure) {
    if (failure.name === "AbortError") {
      if (running === control) element("status").textContent = "Stopped.";
      return false;
    }
    request.showFailure(failure);
    if (failure.name !== "RequestFailure") throw failure;
    return false;
  } finally {
    if (running === control) {
      running = null;
      busy(sweeping);
      refresh();
      renewLadder();
    }
  }
}

/** Predictions follow the load: they are read again after a request, but not after every one. */
async function renewLadder() {
  const asked = model;
  if (performance.now() - ladderReadMs < RENEW_AFTER_MS) return;
  ladderReadMs = performance.now();
  try {
    const newer = await api.ladder(asked.id);
    if (model !== asked || newer.rungs.length !== ladder.rungs.length) return;
    ladder = newer;
    dial.renew(ladder);
    refresh();
  } catch (failure) {
    // The predictions on the page stay; the next request says what is wrong with the server.
    if (failure.name !== "RequestFailure") throw failure;
  }
}

async function sweep() {
  sweeping = true;
  const [swept, count] = [model, ladder.rungs.length];
  try {
    for (let index = 0; index < count && sweeping && model === swept; index += 1) {
      dial.choose(index);
      if (!(await send())) break;
    }
  } finally {
    sweeping = false;
    busy(false);
  }
}

function stop() {
  sweeping = false;
  running?.abort();
}

async function copyCurl() {
  const pre = element("curl");
  try {
    await navigator.clipboard.writeText(pre.textContent);
    element("copy").textContent = "Copied";
  } catch {
    // Pages that are neither local nor https may not write the clipboard: leave the text selected.
    getSelection().selectAllChildren(pre);
    element("copy").textContent = "Selected: copy it with the keyboard";
  }
  setTimeout(() => { element("copy").textContent = "Copy"; }, 2000);
}

const free = (button) => element(button).getAttribute("aria-disabled") !== "true";

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (free("send")) send();
});
element("form").addEventListener("input", refresh);
element("sweep").addEventListener("click", () => free("sweep") && sweep());
element("stop").addEventListener("click", stop);
element("copy").addEventListener("click", copyCurl);
element("clear").addEventListener("click", () => {
  history.clear(model.id);
  refresh();
});
element("banner-close").addEventListener("click", () => { element("banner").hidden = true; });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && model && free("send")) element("form").requestSubmit();
});

start();
