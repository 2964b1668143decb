// Two answers to one input: where their tokens or labels differ, and what the time of each was.
// Compares token by token at the same place, which the same seed makes meaningful.

import * as format from "./format.js";

/** Marks tokens of two answers as they come; each pair is looked at once. `whole`: texts in one piece, of beams. */
export function createComparison(first, second, whole) {
  let [seen, same, differing] = [0, 0, 0];

  function update() {
    const [a, b] = [first.tokens.list(), second.tokens.list()];
    for (; seen < Math.min(a.length, b.length); seen += 1) {
      if (a[seen].text === b[seen].text) {
        if (!differing) same += 1;
        continue;
      }
      first.tokens.mark(seen, b[seen].text, !differing);
      second.tokens.mark(seen, a[seen].text, !differing);
      differing += 1;
    }
  }

  /** What came of it, in a sentence or two. */
  function words() {
    const times = timesInWords(first.outcome(), second.outcome());
    if (!seen) return times;
    if (whole) return `${differing ? "The texts differ." : "Both texts are the same."} ${times}`.trim();
    const what = differing
      ? `The same for ${same === 1 ? "1 token" : `${same} tokens`}, then ${differing} of the other ${seen - same} differ.`
      : `All ${seen} tokens are the same.`;
    return `${what} ${times}`.trim();
  }

  return { update, words };
}

export function labelsInWords(first, second) {
  const [a, b] = [first.outcome(), second.outcome()];
  if (!a || !b) return "";
  if (a.labels) {
    const differing = a.labels.filter((label, at) => label !== b.labels?.[at]).length;
    const how = differing ? `${differing} of ${a.labels.length} labels differ.` : `All ${a.labels.length} labels are the same.`;
    return `${how} ${timesInWords(a, b)}`.trim();
  }
  const what = a.label === b.label ? `Both say ${a.label}.` : `They disagree: ${a.label} and ${b.label}.`;
  return `${what} ${timesInWords(a, b)}`.trim();
}

function timesInWords(a, b) {
  if (!a || !b) return "";
  const times = `${format.milliseconds(a.totalMs)} at ${format.stepsWord(a.steps)}, ${format.milliseconds(b.totalMs)} at ${format.stepsWord(b.steps)}`;
  return `${times}.`;
}
