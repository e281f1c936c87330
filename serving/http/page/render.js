// SPDX-License-Identifier: Apache-2.0
// Blocks of Markdown as elements. What stands does not change while more text comes: only the last blocks are redrawn.

import { el } from "./dom.js";
import { blocksOf, spansOf } from "./markdown.js";

/** @typedef {(start: number, end: number) => {start: number, end: number, segment: number}[]} Cut */

/**
 * Shows `text` in `place`. `cut` gives the pieces of a range; those of a token can be pointed at.
 * @param {HTMLElement} place
 * @param {string} text
 * @param {Cut} cut
 * @param {boolean} whole whether to draw all of it anew
 */
export function render(place, text, cut, whole) {
  const blocks = blocksOf(text);
  const old = whole ? [] : [...place.children];
  let kept = 0;
  // The last one that was there may have grown, and so may the one before it, by a line that went on.
  while (kept < Math.min(blocks.length, old.length) - 1 && old[kept].dataset.at === markOf(blocks[kept])) kept += 1;
  const fresh = blocks.slice(kept).map((block) => {
    const node = drawn(block, text, cut);
    node.dataset.at = markOf(block);
    return node;
  });
  while (place.children.length > kept) place.lastElementChild.remove();
  place.append(...fresh);
}

/** Shows `text` as it is. */
export function renderPlain(place, text, cut) {
  place.replaceChildren(...pieces(text, 0, text.length, cut));
}

function markOf(block) {
  return `${block.kind} ${block.start} ${block.end}`;
}

const TAGS = { paragraph: "p", heading: "h4" };

function drawn(block, text, cut) {
  if (block.kind === "rule") return el("hr");
  if (block.kind === "code" || block.kind === "table") {
    const code = el("code", {}, ...joined(block.lines, (line) => pieces(text, line.start, line.end, cut)));
    const box = el("pre", { tabindex: "0", dir: "ltr" }, code);
    box.setAttribute("aria-label", block.language ? `Code, ${block.language}` : block.kind === "table" ? "Table" : "Code");
    box.setAttribute("role", "group");
    return box;
  }
  if (block.kind === "quote") return el("blockquote", {}, ...block.items[0].map((one) => drawn(one, text, cut)));
  if (block.items) {
    const items = block.items.map((item) => el("li", { dir: "auto" }, ...tight(item, text, cut)));
    return block.kind === "list" ? el("ul", {}, ...items) : el("ol", { start: block.first }, ...items);
  }
  return el(TAGS[block.kind], { dir: "auto" }, ...inline(block.lines, text, cut));
}

/** An item that is one paragraph, or begins with it, needs no paragraph around it. */
function tight(item, text, cut) {
  const [first, ...rest] = item;
  const lead = first?.kind === "paragraph" ? inline(first.lines, text, cut) : first ? [drawn(first, text, cut)] : [];
  return [...lead, ...rest.map((one) => drawn(one, text, cut))];
}

/** Lines of running text: emphasis may go over their ends where nothing nests them. */
function inline(lines, text, cut) {
  return joined(lines, (run) => spansOf(text, run.start, run.end).flatMap((span) => styled(span, text, cut)));
}

function styled(span, text, cut) {
  if (span.inner) return [el(span.style, {}, ...span.inner.flatMap((one) => styled(one, text, cut)))];
  const found = pieces(text, span.start, span.end, cut);
  return span.style === "code" ? [el("code", {}, ...found)] : found;
}

/** What `make` gives for each run of lines that follow each other in the source, with line ends between. */
function joined(lines, make) {
  const runs = [];
  for (const { start, end } of lines) {
    if (runs.length && runs.at(-1).end + 1 === start) runs.at(-1).end = end;
    else runs.push({ start, end });
  }
  return runs.flatMap((run, at) => (at ? ["\n", ...make(run)] : make(run)));
}

function pieces(text, start, end, cut) {
  return cut(start, end).map((piece) => {
    const own = text.slice(piece.start, piece.end);
    return piece.segment < 0 ? own : el("span", { class: "token", tabindex: "-1", "data-segment": piece.segment }, own);
  });
}
