// The request as code, a tab for each language, with what copies it. Knows no server.

import { element } from "./shape.js";
import { LANGUAGES } from "./snippets.js";

const BACK_AFTER_MS = 2000;

/** `say` tells a screen reader what was copied. */
export function createCode(say) {
  const names = Object.keys(LANGUAGES);
  const tabs = names.map((name) => element(`tab-${name}`));
  const panel = element("code");
  let [chosen, request, hasKey] = [names[0], null, false];

  function choose(name) {
    chosen = name;
    for (const [at, tab] of tabs.entries()) {
      const on = names[at] === name;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `tab-${name}`);
    draw();
  }

  function draw() {
    const code = LANGUAGES[chosen](request, hasKey);
    if (panel.textContent !== code) panel.textContent = code;
  }

  function update(newRequest, newHasKey) {
    [request, hasKey] = [newRequest, newHasKey];
    draw();
  }

  for (const [at, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(names[at]));
    tab.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1 + names.length, Home: 0, End: names.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const next = moves[event.key] % names.length;
      choose(names[next]);
      tabs[next].focus();
    });
  }
  element("copy").addEventListener("click", () => copy(panel.textContent, element("copy"), () => getSelection().selectAllChildren(panel)));

  /** Copies a text and says so on the button; `fallback` runs where pages may not write the clipboard. */
  async function copy(text, button, fallback) {
    const usual = (button.dataset.usual ??= button.textContent);
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // Pages that are neither local nor https may not.
      fallback();
      button.textContent = "Selected: copy it yourself";
    }
    say(button.textContent);
    setTimeout(() => { button.textContent = usual; }, BACK_AFTER_MS);
  }

  return { update, copy };
}
