// The playground: joins model, dial, form, answers, plot, code and link. Knows when to send; not how.

import * as api from "./api.js";
import { createBurst } from "./burst.js";
import { createCode } from "./code.js";
import { callMs } from "./deadline.js";
import { createDial } from "./dial.js";
import { callsOf, createForm, writes } from "./form.js";
import * as format from "./format.js";
import { createFrontier } from "./frontier.js";
import { createHistory } from "./history.js";
import { isWanted } from "./key.js";
import { fromFragment, keepsPicture, toFragment } from "./link.js";
import { createLive } from "./live.js";
import { createPicture } from "./picture.js";
import { createRuns } from "./runs.js";
import { element, make } from "./shape.js";

const RESEND_AFTER_MS = 160;
const ADDRESS_AFTER_MS = 400;

const say = (text) => { element("status").textContent = text; };
const views = [...element("views").querySelectorAll("input")];
const history = createHistory(element("history"));
const dial = createDial(turned, () => callsOf(model));
const frontier = createFrontier(element("frontier"), (index) => dial.choose(index));
const picture = createPicture(turned);
const form = createForm(picture, exampleTaken);
const runs = createRuns(() => ({ model, ladder, form, dial, name: () => nameOf(dial.state()) }), answered, ended);
const live = createLive(renewed);
const code = createCode(say);
const burst = createBurst(() => ({ model, ladder, form }), () => live.soon());

let models = [];
let model = null;
let ladder = null;
let openings = 0;
let [resendTimer, addressTimer] = [0, 0];

function notice(title, text, retry) {
  element("notice-title").textContent = title;
  element("notice-text").textContent = text;
  element("notice-retry").hidden = !retry;
  element("notice-retry").onclick = () => {
    element("notice-text").textContent = "The server is asked again.";
    retry();
  };
  element("notice").hidden = false;
  element("playground").hidden = true;
}

async function start() {
  try {
    models = await api.models();
  } catch (failure) {
    notice(failure.title ?? "The models could not be read", failure.message, start);
    if (failure.name !== "RequestFailure") throw failure;
    return;
  }
  if (!models.length) {
    notice("This server has no models", "Start it with a bundle: stepdial serve BUNDLE. Without a bundle it serves the zoo.", start);
    return;
  }
  element("models").replaceChildren(element("models").querySelector("legend"), ...models.map(modelButton));
  element("models").hidden = false;
  await restore(fromFragment(location.hash) ?? {});
}

/** Take up the state of a link; what it does not say stays as usual. */
async function restore(state) {
  const wanted = models.find(({ id }) => id === state.model);
  await open(wanted ?? mostRange() ?? models.find(writes) ?? models[0], { view: "one", ...(wanted ? state : {}) });
  if (!state.model || wanted) return;
  element("banner-text").textContent = `The link is for ${state.model}, which this server does not have. This is another model.`;
  element("banner").hidden = false;
}

/** The model whose steps buy most, where that is beyond doubt. */
function mostRange() {
  const moving = models.filter(({ range }) => range?.low > 0);
  return moving.sort((a, b) => b.range.value - a.range.value)[0];
}

function modelButton(entry) {
  const radio = make("input", { type: "radio", name: "model", value: entry.id });
  radio.addEventListener("change", () => open(entry, {}));
  return make("label", {}, radio, make("span", { text: entry.id }));
}

async function open(entry, wanted) {
  clearTimeout(resendTimer);
  runs.stop();
  openings += 1;
  const opening = openings;
  let rungs;
  try {
    rungs = await api.ladder(entry.id);
  } catch (failure) {
    if (opening === openings) notice(failure.title ?? "The step counts could not be read", failure.message, failure.status === 404 ? start : () => open(entry, wanted));
    if (failure.name !== "RequestFailure") throw failure;
    return;
  }
  if (opening !== openings) return;
  clearTimeout(resendTimer); // of a dial that was turned meanwhile
  runs.cancel();
  [model, ladder] = [entry, rungs];
  for (const radio of element("models").querySelectorAll("input")) radio.checked = radio.value === model.id;
  form.load(model, wanted);
  runs.load(ladder, wanted.against);
  if (wanted.view) setView(wanted.view);
  element("model-about").textContent = model.card?.title ?? model.card?.description ?? model.id;
  element("about-server").textContent = describe(model);
  const isRetried = document.activeElement === element("notice-retry");
  element("notice").hidden = true;
  element("playground").hidden = false;
  if (isRetried) toInput(); // the button is gone
  dial.load(ladder, mode(), model.max_disagreement ?? [], { steps: model.default_steps, ...wanted });
  live.watch(model.id);
  burst.load();
  refresh();
}

const toInput = () => element(model?.input.kind === "image" ? "file" : "input").focus();

function describe({ id, task, precision, cache, parameters, card }) {
  const caches = { kv_fp16: "16-bit caches", kv_int8: "8-bit caches" }[cache];
  const parts = [id, task, precision, caches, parameters && `${format.count(parameters)} parameters`, card?.license];
  return parts.filter(Boolean).join(" · ");
}

function setView(view) {
  const on = view === "two";
  for (const radio of views) radio.checked = radio.value === (on ? "two" : "one");
  runs.setTwo(on);
}

/** What the dial, the plot and the table need to know of the task. */
const mode = () => (writes(model) ? "generate" : "classify");

function refresh() {
  plot();
  history.draw(model.id, mode(), ladder.metric);
  element("clear").hidden = history.size(model.id) === 0;
  runs.name();
  code.update(form.request(dial.budget()), isWanted());
  element("code-note").textContent = runs.isTwo() ? "Of the first answer; the second differs in its steps only." : "";
  live.setEager(dial.way() === "deadline");
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => window.history.replaceState(null, "", toFragment(state())), ADDRESS_AFTER_MS);
}

function plot() {
  const rung = dial.rung();
  const deadlineMs = dial.way() === "deadline" ? callMs(ladder, callsOf(model), dial.deadlineMs()) : null;
  frontier.update({ ladder, task: mode(), index: rung ? ladder.rungs.indexOf(rung) : -1, deadlineMs });
  element("frontier-title").textContent = frontier.isTimed() ? "Quality against latency" : "Quality against work";
  element("legend").hidden = !frontier.isTimed();
}

function nameOf({ way, steps, deadlineMs, level }) {
  if (way === "deadline") return `Within ${format.duration(deadlineMs)}`;
  return way === "agreement" ? `At most ${format.percent(level)} differ` : format.stepsWord(steps);
}

function state() {
  const { way, steps, deadlineMs, level } = dial.state();
  const budget = { steps: { steps }, deadline: { steps, deadlineMs }, agreement: { steps, level } }[way];
  const view = runs.isTwo() ? { view: "two", against: runs.against.value } : { view: "one" };
  return { ...form.state(), way, ...budget, ...view };
}

/** A link for others holds the seed that was drawn, so that they get the same text. */
async function copyLink() {
  const kept = state();
  if (writes(model)) kept.seed ||= runs.seed() ?? "";
  const url = api.address(toFragment(kept));
  window.history.replaceState(null, "", toFragment(kept));
  clearTimeout(addressTimer);
  await code.copy(url, element("copy-link"), () => {
    element("code-note").textContent = url;
    getSelection().selectAllChildren(element("code-note"));
  });
  if (!keepsPicture(kept)) element("code-note").textContent = "The picture is too large for a link: the link holds all else.";
}

function turned() {
  refresh();
  if (writes(model) || runs.isSweeping()) return;
  clearTimeout(resendTimer);
  if (!form.hasInput()) {
    runs.cancel();
    runs.clear();
    runs.name();
    return;
  }
  resendTimer = setTimeout(runs.send, RESEND_AFTER_MS);
}

function exampleTaken() {
  refresh();
  if (!writes(model)) runs.send();
}

function answered({ model: sent, ladder: { metric, rungs }, outcome, isFirst }) {
  const { budget, steps, ms, firstMs, answer } = outcome;
  const quality = budget.expected?.value ?? rungs.find((rung) => rung.steps === steps)?.quality?.value;
  history.add(sent.id, { steps, metric, quality, ms, firstMs, answer });
  if (isFirst && sent === model) dial.answered(steps);
}

function ended() {
  refresh();
  live.soon();
}

/**
 * Of what is shown only the predictions change: a link that waits to be copied stays. A model that
 * was replaced by one of other step counts keeps its own here until the page is opened again.
 */
function renewed(newer) {
  const steps = ({ rungs }) => String(rungs.map((rung) => rung.steps));
  if (steps(newer) !== steps(ladder)) return;
  ladder = newer;
  dial.renew(ladder);
  plot();
}

const free = (button) => element(button).getAttribute("aria-disabled") !== "true";

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(resendTimer);
  if (free("send")) runs.send();
});
element("form").addEventListener("input", () => {
  if (!model) return;
  dial.renew();
  refresh();
});
for (const radio of views) {
  radio.addEventListener("change", () => {
    setView(radio.value);
    refresh();
  });
}
runs.against.addEventListener("change", turned);
element("sweep").addEventListener("click", () => free("sweep") && element("form").reportValidity() && runs.sweep());
element("stop").addEventListener("click", runs.stop);
element("copy-link").addEventListener("click", copyLink);
element("clear").addEventListener("click", () => {
  history.clear(model.id);
  refresh();
  element("history").focus(); // the button is gone
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address holds the state
  toInput();
});
window.addEventListener("hashchange", (event) => {
  // Not location: the address may have been brought up to date meanwhile.
  const wanted = fromFragment(new URL(event.newURL).hash);
  if (wanted && models.length) restore(wanted);
});
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return; // the key is for the input method
  if (event.key === "Escape" && runs.isRunning()) runs.stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !element("playground").hidden && free("send")) element("form").requestSubmit();
});

start();
