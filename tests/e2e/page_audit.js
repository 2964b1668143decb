// Measures what a reader and a screen reader meet: contrast, names of controls, sideways overflow,
// and text that is cut off.
// One expression, so that it runs under a content policy that forbids eval. Knows no page.
() => {
  const LEAST_CONTRAST = 4.5;
  const LEAST_EDGE_CONTRAST = 3; // of what shows where a field is
  const FIELDS = "input[type=number], input[type=password], input[type=search], textarea, select";
  const COLOUR = /(?:rgba?|color|oklab|oklch)\([^()]*\)/g;

  const shown = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const unseen = (node) => node.closest(".unseen, .skip") !== null;
  const describe = (node) => `${node.tagName.toLowerCase()}#${node.id}.${node.getAttribute("class") ?? ""} "${(node.textContent ?? "").trim().slice(0, 40)}"`;

  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return { channels: [red, green, blue], alpha: alpha / 255 };
  };
  const over = (front, back) => front.channels.map((value, i) => front.alpha * value + (1 - front.alpha) * back[i]);
  const groundOf = (node) => {
    if (!node) return [255, 255, 255];
    const own = rgba(getComputedStyle(node).backgroundColor);
    return own.alpha === 1 ? own.channels : over(own, groundOf(node.parentElement));
  };
  const luminance = (channels) => {
    const [red, green, blue] = channels.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (first, second) => {
    const [dark, light] = [luminance(first), luminance(second)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };

  const texts = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    if (walker.currentNode.data.trim()) texts.add(walker.currentNode.parentElement);
  }
  for (const field of document.querySelectorAll(FIELDS)) texts.add(field);
  const faint = [...texts].filter((node) => shown(node) && !unseen(node)).flatMap((node) => {
    const style = getComputedStyle(node);
    const ground = groundOf(node);
    const inks = [node instanceof SVGElement ? style.fill : style.color];
    if (node.placeholder) inks.push(getComputedStyle(node, "::placeholder").color);
    // A shade may cover only a part of a letter, so both grounds count.
    const shades = style.backgroundImage.match(COLOUR) ?? [];
    const grounds = [ground, ...shades.map((shade) => over(rgba(shade), ground))];
    const ratio = Math.min(...inks.flatMap((ink) => grounds.map((one) => contrast(over(rgba(ink), one), one))));
    return ratio < LEAST_CONTRAST ? [`${ratio.toFixed(2)} ${describe(node)}`] : [];
  });

  const edgeless = [...document.querySelectorAll(FIELDS)].filter((node) => shown(node) && !unseen(node)).flatMap((node) => {
    const ground = groundOf(node.parentElement);
    const ratio = contrast(rgba(getComputedStyle(node).borderTopColor).channels, ground);
    return ratio < LEAST_EDGE_CONTRAST ? [`edge ${ratio.toFixed(2)} ${describe(node)}`] : [];
  });

  const nameOf = (node) => {
    const pointed = (node.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent);
    const labels = [...(node.labels ?? [])].map((label) => label.textContent);
    const own = ["INPUT", "TEXTAREA", "SELECT"].includes(node.tagName) ? "" : node.textContent;
    return [node.getAttribute("aria-label"), ...pointed, ...labels, own].join(" ").trim();
  };
  const controls = document.querySelectorAll("button, input, textarea, select, a[href], summary, [tabindex], [role=button]");
  const nameless = [...controls].filter((node) => shown(node) && node.tabIndex >= 0 && !nameOf(node));

  const overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  // A row that snaps is meant to be pushed aside, and a title holds what an ellipsis leaves out.
  const cut = [...document.querySelectorAll("body *")].filter((node) => {
    if (!(node instanceof HTMLElement) || !shown(node) || unseen(node)) return false;
    const style = getComputedStyle(node);
    if (style.overflowX === "visible" || style.scrollSnapType !== "none") return false;
    if (style.textOverflow === "ellipsis" && node.title) return false;
    return node.scrollWidth > node.clientWidth + 1;
  });
  return {
    contrast: [...faint, ...edgeless],
    name: nameless.map(describe),
    overflow: [...(overflow > 0 ? [`${overflow} px wider than the window`] : []), ...cut.map((node) => `cut: ${describe(node)}`)],
    measured: [`${texts.size} texts`, `${controls.length} controls`],
  };
}
