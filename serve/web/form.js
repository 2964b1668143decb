// The form: what is asked, and the request that it makes. Knows models; sends nothing.

import { element, make } from "./shape.js";

const EXAMPLE_LETTERS = 46;
const SHORT_LETTERS = 14;
const SHOWN_LABELS = 10;
const USUAL_TOKENS = 128; // what the server takes where nothing is said
const VERBS = { classify: "Classify", tag: "Label", generate: "Generate", translate: "Translate" };
const TITLES = { classify: "Text", tag: "Text", generate: "Prompt", translate: "Text to translate" };
const INPUT_TITLES = { image: "Image", points: "Points: [[x, ...], ...]" };
const TEMPERATURES = { generate: "0.8", translate: "0" };
const FIELDS = { tokens: "max-tokens", temperature: "temperature", beams: "beams", seed: "seed" };

/** Whether the model writes a text; else it labels what it is given. */
export const writes = (model) => !["classify", "tag"].includes(model.task);

const sees = (model) => model.input.kind === "image";

const numberIn = (id) => {
  const value = element(id).value.trim();
  return value === "" ? undefined : Number(value);
};

/** How many calls of the model an answer takes at most. A translation ends at the model's own limit too. */
export const callsOf = (model) =>
  (writes(model) ? Math.max(1, Math.min(numberIn("max-tokens") ?? USUAL_TOKENS, model.target_max_tokens ?? Infinity)) : 1);

/** `onExample` runs when the reader takes one. */
export function createForm(picture, onExample) {
  const drafts = new Map();
  let model = null;

  function load(next, wanted = {}) {
    const before = model;
    if (before) drafts.set(before.id, sees(before) ? drawn() : element("input").value);
    model = next;
    const examples = (model.card?.examples ?? []).filter((example) => typeof example === "string");
    const title = INPUT_TITLES[model.input.kind] ?? TITLES[model.task];
    element("ask-title").textContent = element("input-label").textContent = title;
    if (!sees(model)) element("input").value = wanted.text ?? drafts.get(model.id) ?? examples[0] ?? "";
    element("input").hidden = sees(model);
    element("picture").hidden = !sees(model);
    if (sees(model)) picture.load(model.input);
    const pictured = wanted.picture ?? drafts.get(model.id);
    if (sees(model) && pictured) picture.restore(pictured);
    element("examples").replaceChildren(...(examples.length > 1 && !sees(model) ? examples.map(exampleButton) : []));
    element("options").hidden = !writes(model);
    element("beams-label").hidden = model.task !== "translate";
    // A field that is hidden must not keep the form from being sent.
    for (const input of element("options").querySelectorAll("input")) input.disabled = !writes(model);
    element("beams").disabled = model.task !== "translate";
    element("file").disabled = !sees(model);
    if (writes(model) && before?.task !== model.task) element("temperature").value = TEMPERATURES[model.task];
    for (const [name, id] of Object.entries(FIELDS)) if (wanted[name] !== undefined) element(id).value = wanted[name];
    element("send").textContent = VERBS[model.task];
    noteLength();
  }

  const drawn = () => (picture.isDrawn() ? picture.dataUrl() : undefined);

  /** Beside a text whose length is fixed: what it must be, and what it is. */
  function noteLength() {
    element("input-note").hidden = !model.input.exact;
    const now = [...element("input").value].length;
    element("input-note").textContent = model.input.exact ? `Exactly ${model.input.max_tokens} tokens. Now: ${now} characters.` : "";
  }

  function exampleButton(example) {
    const line = example.replace(/\s+/g, " ").trim();
    const text = line.length > EXAMPLE_LETTERS ? `${line.slice(0, EXAMPLE_LETTERS).trimEnd()}…` : line;
    const button = make("button", { type: "button", text, title: example, className: line.length <= SHORT_LETTERS ? "short" : "" });
    button.addEventListener("click", () => {
      element("input").value = example;
      noteLength();
      onExample();
    });
    return button;
  }

  function inputOf() {
    if (sees(model)) return { image: picture.dataUrl() };
    const text = element("input").value;
    if (model.input.kind !== "points") return text;
    try {
      return { points: JSON.parse(text) };
    } catch {
      return { points: text }; // the server says what is wrong with it
    }
  }

  /** The request as the form stands, with this budget; `seed` stands in for a missing one. */
  function request(budget, seed) {
    if (!writes(model)) {
      if (model.task === "tag") {
        return { path: "v1/classify", writes: false, traces: model.traces, body: { model: model.id, input: inputOf(), ...budget } };
      }
      const topK = model.labels?.length ? { top_k: Math.min(model.labels.length, SHOWN_LABELS) } : {};
      return { path: "v1/classify", writes: false, body: { model: model.id, input: inputOf(), ...budget, ...topK } };
    }
    const translates = model.task === "translate";
    const beams = translates ? numberIn("beams") : undefined;
    const sampling = {
      max_tokens: numberIn("max-tokens"),
      temperature: beams > 1 ? undefined : numberIn("temperature"),
      num_beams: beams > 1 ? beams : undefined,
      seed: numberIn("seed") ?? seed,
    };
    const given = Object.fromEntries(Object.entries(sampling).filter(([, value]) => value !== undefined));
    return { path: "v1/generate", writes: true, translates, usualTokens: USUAL_TOKENS, body: { model: model.id, prompt: element("input").value, ...budget, ...given, stream: true } };
  }

  /** What a link keeps of it. */
  function state() {
    if (sees(model)) return { model: model.id, picture: drawn() };
    const names = Object.keys(FIELDS).filter((name) => writes(model) && (name !== "beams" || model.task === "translate"));
    const fields = Object.fromEntries(names.map((name) => [name, element(FIELDS[name]).value.trim()]));
    return { model: model.id, text: element("input").value, ...fields };
  }

  const hasInput = () => (sees(model) ? picture.isDrawn() : element("input").value.trim() !== "");

  element("input").addEventListener("input", noteLength);

  return { load, request, state, hasInput };
}
