// The requests of this session: a table that compares them, and the median latency at each rung.
// Knows nothing of HTTP and forgets everything when the page closes.

import * as format from "./format.js";

const SHOWN = 8;

/** An entry: {steps, metric, quality, ms (of a request or a token), firstMs?, answer}. */
export function createHistory(holder) {
  const entries = new Map();

  const of = (model) => entries.get(model) ?? [];

  function add(model, entry) {
    entries.set(model, [entry, ...of(model)]);
  }

  function live(model) {
    const bySteps = new Map();
    for (const { steps, ms } of of(model)) bySteps.set(steps, [...(bySteps.get(steps) ?? []), ms]);
    return new Map([...bySteps].map(([steps, times]) => [steps, { ms: format.median(times), count: times.length }]));
  }

  function draw(model, task, metric) {
    const rows = of(model).slice(0, SHOWN);
    if (!rows.length) {
      const hint = document.createElement("p");
      hint.className = "empty";
      hint.textContent = "Send the same input at two settings of the dial: the difference shows here.";
      holder.replaceChildren(hint);
      return;
    }
    const names = task === "generate"
      ? ["Steps", format.sentence(metric), "First token", "A token", "Tokens/s"]
      : ["Steps", format.sentence(metric), "Latency", "Answer"];
    const longest = Math.max(...rows.map((row) => row.ms));
    const table = document.createElement("table");
    const caption = table.createCaption();
    caption.className = "unseen";
    caption.textContent = "The last requests, newest first";
    const head = table.createTHead().insertRow();
    for (const name of names) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = name;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      line.insertCell().textContent = row.steps;
      line.insertCell().textContent = format.quality(row.metric, row.quality);
      if (task === "generate") line.insertCell().textContent = format.milliseconds(row.firstMs);
      bar(line.insertCell(), row.ms, row.ms / longest);
      if (task === "generate") line.insertCell().textContent = format.rate(1000 / row.ms);
      else line.insertCell().textContent = row.answer;
    }
    holder.replaceChildren(table);
  }

  return { add, live, draw, size: (model) => of(model).length, clear: (model) => entries.delete(model) };
}

function bar(cell, ms, share) {
  cell.className = "bar";
  const fill = document.createElement("i");
  fill.style.width = `${Math.max(2, 100 * share)}%`;
  const text = document.createElement("span");
  text.textContent = format.milliseconds(ms);
  cell.append(text, fill);
}
