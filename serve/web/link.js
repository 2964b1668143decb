// The state of the page as the fragment of its address, and back. Fragments are sent to no server.
// Pure: knows strings; whether a state makes sense is for those who take it up.

const MOST_PICTURE_LETTERS = 24_000;

const NUMBERS = { steps: "steps", deadline_ms: "deadlineMs", max_disagreement: "level", against: "against" };
const TEXTS = { model: "model", by: "way", view: "view", tokens: "tokens", temperature: "temperature", beams: "beams", seed: "seed", picture: "picture", text: "text" };

export function toFragment(state) {
  const fields = new URLSearchParams();
  for (const [name, key] of [...Object.entries(TEXTS), ...Object.entries(NUMBERS)]) {
    const value = state[key];
    if (value === undefined || value === null) continue; // an empty field is a choice too
    if (key === "picture" && value.length > MOST_PICTURE_LETTERS) continue;
    fields.set(name, String(value));
  }
  return `#${fields}`;
}

export const keepsPicture = ({ picture }) => !picture || picture.length <= MOST_PICTURE_LETTERS;

/** The state of a fragment; null for one that names no model. */
export function fromFragment(fragment) {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  if (!fields.get("model")) return null;
  const state = {};
  for (const [name, key] of Object.entries(TEXTS)) if (fields.has(name)) state[key] = fields.get(name);
  for (const [name, key] of Object.entries(NUMBERS)) {
    const number = Number(fields.get(name) ?? NaN);
    if (Number.isFinite(number) && number > 0) state[key] = number;
  }
  // Anything else than a picture would be asked for from wherever it lies.
  if (!state.picture?.startsWith("data:image/")) delete state.picture;
  return state;
}
