// The picture of the depth from input to output, crossed in as many hops as there are steps.
// An answer that came early is drawn with its hops, then the straight jump to the end.

import { element, shape } from "./shape.js";

export function createHops() {
  const svg = element("hops");
  let [steps, taken] = [0, 0];
  new ResizeObserver(() => steps && draw()).observe(svg);

  function show(newSteps, newTaken = newSteps) {
    [steps, taken] = [newSteps, newTaken];
    draw();
  }

  function draw() {
    const { width, height } = svg.getBoundingClientRect();
    if (width < 40) return;
    const [left, right, ground] = [6, width - 6, height - 20];
    const hop = (right - left) / steps;
    const rise = Math.min(hop * 0.62, ground - 6);
    const arcs = Array.from({ length: taken }, (_, i) => `M${left + i * hop} ${ground}q${hop / 2} ${-2 * rise} ${hop} 0`);
    const stops = Array.from({ length: steps + 1 }, (_, i) => {
      const isEnd = i % steps === 0;
      return shape("circle", { class: isEnd ? "end" : i <= taken ? "stop" : "passed", cx: left + i * hop, cy: ground, r: isEnd ? 4 : 2.25 });
    });
    const parts = [shape("path", { class: "ground", d: `M${left} ${ground}H${right}` }), shape("path", { class: "hop", d: arcs.join("") })];
    if (taken > 0 && taken < steps) {
      const from = left + taken * hop;
      parts.push(
        shape("path", { class: "jump", d: `M${from} ${ground}H${right}` }),
        shape("text", { class: "jump-name", x: (from + right) / 2, y: ground - 9, "text-anchor": "middle" }, "jump"),
      );
    }
    parts.push(...stops,
      shape("text", { x: 0, y: height - 2 }, "input"),
      ...(width > 240 ? [shape("text", { x: width / 2, y: height - 2, "text-anchor": "middle" }, "one arc per step")] : []),
      shape("text", { x: width, y: height - 2, "text-anchor": "end" }, "output"));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...parts);
  }

  return { show };
}
