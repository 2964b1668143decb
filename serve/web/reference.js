// The API reference at /docs: the search, shapes that open when a link leads to them, and the
// forms that send a request. The page is complete without it, but for these.

const KEY_NAME = "stepdial.key"; // as key.js names it: one key for both pages
const MOST_SHOWN = 20_000; // characters of an answer

const entries = [...document.querySelectorAll(".entry")].map((node) => ({ node, text: node.textContent.toLowerCase() }));
const links = new Map([...document.querySelectorAll("aside li a")].map((link) => [link.getAttribute("href").slice(1), link.parentElement]));
const search = document.getElementById("search");
const contents = document.getElementById("contents");
const found = document.getElementById("found");
const key = document.getElementById("api-key");
const latest = new WeakMap(); // of each form: what was sent last, whose answer is shown

/** Shows what holds every word of the search. */
function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const { node, text } of entries) {
    const fits = words.every((word) => text.includes(word));
    node.hidden = !fits;
    count += fits;
    const item = links.get(node.id);
    if (item) item.hidden = !fits;
  }
  found.textContent = words.length ? `${count} of ${entries.length} routes and shapes have ${words.map((word) => `“${word}”`).join(" and ")}.` : "";
}

/** A link to a shape opens it. */
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.hidden) {
    search.value = "";
    filter();
  }
  if (target instanceof HTMLDetailsElement) target.open = true;
  target.scrollIntoView();
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return ""; // a browser that keeps nothing: the key lasts as long as the page
  }
}

async function send(form) {
  const [status, shown] = [form.querySelector("[role=status]"), form.querySelector("pre")];
  const body = form.querySelector("textarea");
  let path = form.dataset.path;
  for (const field of form.querySelectorAll("[data-in=path]")) path = path.replace(`{${field.name}}`, encodeURIComponent(field.value));
  const options = { method: form.dataset.method, headers: {} };
  const secret = key.value.trim();
  if (secret && !/^[!-~]+$/.test(secret)) {
    status.textContent = "No API key has such a character: keys are Latin letters, digits and signs. Copy it again from where it was made.";
    return;
  }
  if (secret) Object.assign(options, { credentials: "omit", headers: { authorization: `Bearer ${secret}` } });
  if (body) {
    options.headers["content-type"] = "application/json";
    options.body = body.value;
  }
  latest.set(form, options);
  const isLatest = () => latest.get(form) === options;
  status.textContent = "Sent.";
  shown.hidden = true;
  const startMs = performance.now();
  try {
    // From the place alone: the address of the page may hold a key too, with which nothing is sent.
    const answer = await fetch(new URL(path, location.origin + location.pathname), options);
    const text = await answer.text();
    if (!isLatest()) return;
    status.textContent = `HTTP ${answer.status} after ${Math.round(performance.now() - startMs)} ms.`;
    shown.textContent = readable(text, answer.headers.get("content-type") ?? "");
    shown.hidden = !text;
  } catch (failure) {
    if (!(failure instanceof TypeError)) throw failure;
    if (isLatest()) status.textContent = "The server does not answer.";
  }
}

function readable(text, kind) {
  const whole = kind.includes("json") ? JSON.stringify(JSON.parse(text), null, 2) : text;
  return whole.length > MOST_SHOWN ? `${whole.slice(0, MOST_SHOWN)}\n… ${whole.length} characters in all` : whole;
}

for (const form of document.querySelectorAll(".try form")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
  form.querySelector("select")?.addEventListener("change", (event) => {
    form.querySelector("textarea").value = JSON.stringify(JSON.parse(event.target.value), null, 2);
  });
}
key.value = storedKey();
key.addEventListener("change", () => {
  try {
    sessionStorage.setItem(KEY_NAME, key.value.trim());
  } catch {
    // See above.
  }
});
search.addEventListener("input", filter);
addEventListener("hashchange", openTarget);
contents.open = matchMedia("(min-width: 861px)").matches;
openTarget();
