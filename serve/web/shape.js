// Elements of HTML and SVG made in one call. Knows no page.

const SVG = "http://www.w3.org/2000/svg";

export const element = (id) => document.getElementById(id);

export function make(name, { text, ...properties } = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

export function set(node, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    // Writing what is there already would have the browser lay it out again.
    if (node.getAttribute(key) !== String(value)) node.setAttribute(key, value);
  }
  return node;
}

export function shape(name, attributes, text) {
  const node = set(document.createElementNS(SVG, name), attributes);
  if (text !== undefined) node.textContent = text;
  return node;
}
