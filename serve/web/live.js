// The ladder as it is now: predictions follow the load, so they are read again from time to time.
// Less often while nobody looks at deadlines, not at all while nobody looks at the page.

import * as api from "./api.js";

const EAGER_MS = 3000;
const CALM_MS = 8000;
const LEAST_MS = 1500;
const MOST_MS = 60_000;

/** `onNewer(ladder)` runs when the ladder of the model has been read again. */
export function createLive(onNewer) {
  let [name, timer, readMs, failures, eager] = ["", 0, 0, 0, false];

  function watch(model) {
    [name, readMs, failures] = [model, performance.now(), 0];
    plan();
  }

  function plan() {
    clearTimeout(timer);
    const pause = Math.min(MOST_MS, (eager ? EAGER_MS : CALM_MS) * 2 ** failures);
    timer = setTimeout(read, pause);
  }

  /** After an answer, which may have changed what is predicted. */
  const soon = () => performance.now() - readMs >= LEAST_MS && read();

  async function read() {
    const asked = name;
    if (!asked || document.hidden) return plan();
    readMs = performance.now();
    try {
      const newer = await api.ladder(asked, false);
      failures = 0;
      if (asked === name) onNewer(newer);
    } catch (failure) {
      // What is on the page stays; the next request says what is wrong with the server.
      if (failure.name !== "RequestFailure") throw failure;
      failures += 1;
    }
    plan();
  }

  function setEager(on) {
    if (eager === on) return;
    eager = on;
    if (name) plan();
  }

  return { watch, soon, setEager };
}
