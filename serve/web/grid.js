// The labels of one answer, a cell a token, with the readout after each step: how it came to be.
// Knows one place on the page and one result; not what sends it.

import * as format from "./format.js";
import { make } from "./shape.js";

const STEP_MS = 520;
const BOXES = { 4: [2, 2], 6: [2, 3], 9: [3, 3] }; // rows and columns of a box, by the side
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** `name` is that of the answer, for those who hear the page. */
export function createGrid(name) {
  const cells = make("ol", { className: "cells", ariaLabel: `${name}: labels` });
  const play = make("button", { type: "button", className: "quiet", text: "Play the steps" });
  const range = make("input", { type: "range", min: "1", step: "1", ariaLabel: `${name}: the step that is shown` });
  const words = make("p", { className: "fine" });
  const controls = make("div", { className: "steps-shown" }, play, range);
  const node = make("div", { className: "grid", hidden: true }, cells, controls, words);
  let [result, readouts, nodes, shown, timer] = [null, [], [], "", 0];

  function clear() {
    halt();
    [result, readouts, nodes] = [null, [], []];
    cells.replaceChildren();
    node.hidden = true;
  }

  /** Draws a result; steps that lead to it are played the first time that its input is asked. */
  function show(next) {
    halt();
    const input = next.tokens.map(({ text }) => text).join("\n");
    const isNew = input !== shown;
    [result, shown] = [next, input];
    readouts = next.trace ?? [{ steps: next.budget.steps, labels: next.tokens.map(({ label }) => label), scores: next.tokens.map(({ score }) => score) }];
    const side = next.text === undefined ? 0 : sideOf(next.tokens.length);
    cells.className = side ? "cells puzzle" : "cells line";
    cells.style.setProperty("--side", side || 1);
    nodes = next.tokens.map((token, at) => cellOf(token, at, side));
    cells.replaceChildren(...nodes);
    controls.hidden = readouts.length < 2;
    range.max = String(readouts.length);
    node.hidden = false;
    if (isNew && !still.matches && readouts.length > 1) playAll();
    else draw(readouts.length);
  }

  function cellOf({ text }, at, side) {
    const cell = make("li", {}, make("span", { className: "token-text", text: side ? "" : text }), make("b"));
    cell.classList.toggle("given", isGiven(text));
    if (side) {
      const [high, wide] = BOXES[side] ?? [side, side];
      const [row, column] = [Math.floor(at / side), at % side];
      cell.classList.toggle("box-left", column % wide === 0 && column > 0);
      cell.classList.toggle("box-top", row % high === 0 && row > 0);
    }
    return cell;
  }

  /** A character that stands for a label already is part of the puzzle. */
  const isGiven = (text) => result.text !== undefined && readouts.at(-1).labels.includes(text);

  function draw(count) {
    const [now, before] = [readouts[count - 1], readouts[count - 2]];
    let changed = 0;
    nodes.forEach((cell, at) => {
      const differs = before !== undefined && before.labels[at] !== now.labels[at];
      changed += differs;
      cell.classList.toggle("changed", differs);
      cell.style.setProperty("--sure", now.scores[at].toFixed(3));
      cell.querySelector("b").textContent = now.labels[at];
      cell.title = `${JSON.stringify(result.tokens[at].text)}: ${now.labels[at]}, ${(100 * now.scores[at]).toFixed(1)} %`;
    });
    range.value = String(count);
    range.setAttribute("aria-valuetext", `after ${format.stepsWord(now.steps)}`);
    const what = before === undefined ? "what one step reads out" : `${changed} of ${nodes.length} labels changed`;
    words.textContent = readouts.length > 1 ? `After ${format.stepsWord(now.steps)}: ${what}.` : "";
  }

  function playAll() {
    halt();
    let count = 1;
    draw(count);
    timer = setInterval(() => {
      count += 1;
      draw(count);
      if (count >= readouts.length) halt();
    }, STEP_MS);
  }

  function halt() {
    clearInterval(timer);
    timer = 0;
  }

  play.addEventListener("click", playAll);
  range.addEventListener("input", () => {
    halt();
    draw(Number(range.value));
  });

  return { node, clear, show };
}

/** The side of a square of so many cells that has boxes; 0 if there is none. */
function sideOf(count) {
  const side = Math.round(Math.sqrt(count));
  return side * side === count && side in BOXES ? side : 0;
}
