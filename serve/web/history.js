// The requests of this session: a table that compares them.
// Knows nothing of HTTP and forgets everything when the page closes.

import * as format from "./format.js";
import { make } from "./shape.js";

const SHOWN = 8;

/** An entry: {steps, metric, quality, ms (of a request or a token), firstMs?, answer}. */
export function createHistory(holder) {
  const entries = new Map();

  const of = (model) => entries.get(model) ?? [];

  const add = (model, entry) => entries.set(model, [entry, ...of(model)].slice(0, SHOWN));

  function draw(model, task, metric) {
    const rows = of(model);
    if (!rows.length) {
      holder.replaceChildren(make("p", { className: "empty", text: "Send the same input at two settings of the dial: the difference shows here." }));
      return;
    }
    const writes = task === "generate";
    const names = writes ? ["Steps", `Expected ${metric}`, "First token", "Per token", "Tokens/s"] : ["Steps", `Expected ${metric}`, "Latency", "Answer"];
    const longest = Math.max(...rows.map((row) => row.ms));
    const table = make("table");
    Object.assign(table.createCaption(), { className: "unseen", textContent: "The last requests, newest first" });
    table.createTHead().insertRow().append(...names.map((text) => make("th", { scope: "col", text })));
    const body = table.createTBody();
    for (const row of rows) {
      const cells = [make("td", { text: row.steps }), make("td", { text: format.quality(row.metric, row.quality) })];
      if (writes) cells.push(make("td", { text: format.milliseconds(row.firstMs) }));
      cells.push(bar(row.ms, row.ms / longest), make("td", { text: writes ? format.rate(1000 / row.ms) : row.answer }));
      body.insertRow().append(...cells);
    }
    holder.replaceChildren(table);
  }

  return { add, draw, size: (model) => of(model).length, clear: (model) => entries.delete(model) };
}

function bar(ms, share) {
  const fill = make("i");
  fill.style.width = `${Math.max(2, 100 * share)}%`;
  return make("td", { className: "bar" }, make("span", { text: format.milliseconds(ms) }), fill);
}
