// The tokens of one answer as they come: each shaded by its steps, and saying so in words.
// Knows one place on the page; deliberately not what sends the tokens.

import * as format from "./format.js";
import { make } from "./shape.js";

const AT_END_PX = 40;

/** How high and how strong the shade of a token is, from 0 to 1. */
const depthOf = (steps, fullSteps) => Math.log1p(steps) / Math.log1p(fullSteps);

export function createTokens(holder) {
  let [tokens, spans, fresh, frame, fullSteps] = [[], [], [], 0, 1];
  let onPaint = () => {};

  function clear() {
    cancelAnimationFrame(frame);
    [tokens, spans, fresh, frame] = [[], [], [], 0];
    holder.replaceChildren();
  }

  function start(prompt, steps, painted) {
    clear();
    [fullSteps, onPaint] = [steps, painted];
    holder.replaceChildren(make("span", { className: "prompt", text: prompt }));
  }

  /** Shown once a frame: drawing every token would slow down the stream that is being timed. */
  function add({ text, steps }) {
    const span = make("span", { className: "token", text, title: titleOf(tokens.length, steps) });
    span.style.setProperty("--depth", depthOf(steps, fullSteps).toFixed(3));
    tokens.push({ text, steps });
    spans.push(span);
    fresh.push(span);
    frame ||= requestAnimationFrame(paint);
  }

  function paint() {
    cancelAnimationFrame(frame);
    frame = 0;
    const atEnd = holder.scrollHeight - holder.scrollTop - holder.clientHeight < AT_END_PX;
    holder.append(...fresh);
    fresh = [];
    if (atEnd) holder.scrollTop = holder.scrollHeight;
    onPaint();
  }

  const titleOf = (at, steps) => `Token ${at + 1}: ${format.stepsWord(steps)} of ${fullSteps}`;

  /** Mark a token as another than that of the other answer, `first` where they part. */
  function mark(at, other, first) {
    spans[at].classList.add("differs");
    spans[at].classList.toggle("parts", first);
    spans[at].title = `${titleOf(at, tokens[at].steps)}; the other answer has ${JSON.stringify(other)}`;
  }

  /** How many tokens took each number of steps. */
  function counts() {
    const bySteps = new Map();
    for (const { steps } of tokens) bySteps.set(steps, (bySteps.get(steps) ?? 0) + 1);
    return bySteps;
  }

  return { clear, start, add, paint, mark, counts, list: () => tokens };
}

/** What the shades mean, with how many tokens of all answers had each. */
export function drawShades(list, rungs, counted) {
  list.replaceChildren(...rungs.map(({ steps }) => {
    const swatch = make("i");
    swatch.style.setProperty("--depth", depthOf(steps, rungs.at(-1).steps).toFixed(3));
    const total = counted.reduce((sum, counts) => sum + (counts.get(steps) ?? 0), 0);
    const item = make("li", { className: total ? "used" : "" }, swatch, make("b", { text: String(steps) }));
    item.append(make("span", { text: total ? ` · ${format.count(total)} ${total === 1 ? "token" : "tokens"}` : "" }));
    return item;
  }));
}
