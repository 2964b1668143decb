// The labels of one answer with their scores as bars. Knows one list on the page.

import { make } from "./shape.js";

export function drawScores(list, result) {
  const top = result.top?.length ? result.top : [result];
  // The rows keep the order of the labels, so that bars move rather than jump while the dial turns.
  const order = [...list.children].map((row) => row.dataset.label);
  const known = top.length === order.length && top.every(({ label }) => order.includes(label));
  const rows = known ? order.map((label) => top.find((entry) => entry.label === label)) : top;
  if (!known) list.replaceChildren(...rows.map(row));
  rows.forEach(({ label, score }, at) => {
    const item = list.children[at];
    item.classList.toggle("best", label === result.label);
    item.querySelector("i").style.width = `${100 * score}%`;
    item.querySelector("b").textContent = `${(100 * score).toFixed(1)} %`;
  });
}

function row({ label }) {
  const item = make("li", {}, make("span", { text: label }), make("u", {}, make("i")), make("b"));
  item.dataset.label = label;
  return item;
}
