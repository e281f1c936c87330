// SPDX-License-Identifier: Apache-2.0
// Elements made from data. No markup is parsed anywhere: what a model writes can only become text.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. Attributes that are functions listen ("onclick"), true is set bare, false and null are left out.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node|string)} children
 */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** An icon of one path, drawn in the colour of the text. */
export function icon(path) {
  return svg("svg", { class: "icon", viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", { d: path }));
}

/** The element of that id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/** Says something to screen readers, once. */
export function announce(text) {
  const place = byId("announcer");
  place.textContent = "";
  // A region that is filled in the same turn in which it was emptied may go unread.
  setTimeout(() => {
    place.textContent = text;
  }, 30);
}

/** Sets text only where it is another one, so that nothing is laid out or read anew for nothing. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Fills a meter to a share between 0 and 1. */
export function fill(meter, share, text = "") {
  const bounded = Math.min(Math.max(share, 0), 1);
  meter.firstElementChild.style.inlineSize = `${bounded * 100}%`;
  meter.setAttribute("aria-valuenow", String(Math.round(bounded * 100)));
  if (text) meter.setAttribute("aria-valuetext", text);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}
