// The API key, where the server wants one: asked for in the page, kept until its tab closes.
// Where the browser itself has asked for it (HTTP Basic), there is none here and nothing to ask.

import { element } from "./shape.js";

const NAME = "stepdial.key";
const dialog = element("key-dialog");
const canBeSent = (value) => /^[!-~]+$/.test(value); // in a header

let key = stored();
let asking = null;

function stored() {
  try {
    const kept = sessionStorage.getItem(NAME) ?? "";
    return canBeSent(kept) ? kept : ""; // the reference keeps whatever is typed there
  } catch {
    return ""; // a browser that keeps nothing: the key lasts as long as the page
  }
}

function keep(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // See above.
  }
  element("forget").hidden = !value;
}

let wanted = false; // by the server, whoever sends it: this page, or the browser

/** What the headers of an answer say of keys. */
export function heed(headers) {
  wanted ||= /\bauthorization\b/i.test(headers.get("vary") ?? "");
}

/** Whether a program needs a key where this page got an answer. */
export const isWanted = () => wanted || key !== "";

/** What a request carries: with a key of the page, nothing of the browser's own. */
export const credentials = () =>
  key ? { headers: { authorization: `Bearer ${key}` }, credentials: "omit" } : { headers: {}, credentials: "same-origin" };

/** Ask for a key, once for all requests that lack one; true if there is a new one. */
export function ask(message, refused) {
  // Another request has got a newer key meanwhile: that one is tried first.
  if (refused !== key) return Promise.resolve(true);
  element("key-text").textContent = message;
  asking ??= new Promise((resolve) => {
    dialog.returnValue = "";
    element("key").value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "given";
      if (given) keep(element("key").value.trim());
      element("key").value = "";
      resolve(given);
    }, { once: true });
  });
  return asking;
}

export const current = () => key;

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (canBeSent(element("key").value.trim())) dialog.close("given");
  else element("key-text").textContent = "No key has such a character: keys are Latin letters, digits and signs. Copy it again from where it was made.";
});
element("key-cancel").addEventListener("click", () => dialog.close(""));
element("forget").addEventListener("click", () => {
  keep("");
  element("status").textContent = "The key is forgotten.";
});
element("forget").hidden = !key;
