// SPDX-License-Identifier: Apache-2.0
// A line of the last values, as SVG. The figure beside it says the last one in words.

import { svg } from "./dom.js";

const WIDTH = 96;
const HEIGHT = 24;
const PAD = 2;

/** A line for `length` values. `top` is the least that the height stands for. */
export class Sparkline {
  constructor(length, top) {
    this.length = length;
    this.top = top;
    /** @type {(number|null)[]} */
    this.values = [];
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.node = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
  }

  /** Adds a value; null is a gap. */
  add(value) {
    this.values.push(value);
    if (this.values.length > this.length) this.values.shift();
    const top = Math.max(this.top, ...this.values.filter((one) => one !== null));
    const first = this.length - this.values.length;
    const x = (at) => round(((first + at) / (this.length - 1)) * WIDTH);
    const y = (one) => round(HEIGHT - PAD - (one / top) * (HEIGHT - 2 * PAD));
    let line = "";
    let area = "";
    this.values.forEach((one, at) => {
      if (one === null) return;
      const begins = at === 0 || this.values[at - 1] === null;
      const ends = at === this.values.length - 1 || this.values[at + 1] === null;
      line += `${begins ? "M" : "L"}${x(at)} ${y(one)}`;
      area += `${begins ? `M${x(at)} ${HEIGHT}` : ""}L${x(at)} ${y(one)}${ends ? `L${x(at)} ${HEIGHT}Z` : ""}`;
    });
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

function round(number) {
  return Math.round(number * 10) / 10;
}
