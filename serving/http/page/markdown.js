// SPDX-License-Identifier: Apache-2.0
// A small Markdown: paragraphs, headings, lists, quotes, code, tables as they are typed, emphasis. Links stay text.
// Every piece of text keeps its place in the source, so that tokens can be found in what is shown.

/**
 * @typedef {{start: number, end: number}} Line a line of the source, without its end and without what nests it
 * @typedef {{kind: string, lines: Line[], items?: Block[][], first?: number, level?: number}} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE = /^ {0,3}\|/;
const MAX_DEPTH = 8;

/** The blocks of a text. */
export function blocksOf(text) {
  const lines = [];
  for (let start = 0; start <= text.length; ) {
    const found = text.indexOf("\n", start);
    const end = found < 0 ? text.length : found;
    lines.push({ start, end: text[end - 1] === "\r" && end > start ? end - 1 : end });
    start = end + 1;
  }
  return parse(text, lines, 0);
}

/** @returns {Block[]} */
function parse(text, lines, depth) {
  const blocks = [];
  const spelt = lines.map(({ start, end }) => text.slice(start, end));
  for (let at = 0; at < lines.length; ) {
    const line = spelt[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const block = fenced(lines, spelt, at) ?? single(lines, spelt, at) ?? (depth < MAX_DEPTH && nested(text, lines, spelt, at, depth));
    const { made, next } = block || running(lines, spelt, at);
    blocks.push({ ...made, start: lines[at].start, end: lines[next - 1].end });
    at = next;
  }
  return blocks;
}

function fenced(lines, spelt, at) {
  const fence = FENCE.exec(spelt[at]);
  if (!fence) return null;
  const closing = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(spelt[end])) end += 1;
  const made = { kind: "code", lines: lines.slice(at + 1, end), language: fence[2].trim() };
  return { made, next: Math.min(end + 1, lines.length) };
}

function single(lines, spelt, at) {
  if (RULE.test(spelt[at])) return { made: { kind: "rule", lines: [] }, next: at + 1 };
  const heading = HEADING.exec(spelt[at]);
  if (!heading) return null;
  const { start, end } = lines[at];
  return { made: { kind: "heading", lines: [{ start: start + heading[0].length, end }] }, next: at + 1 };
}

function nested(text, lines, spelt, at, depth) {
  if (QUOTE.test(spelt[at])) {
    let end = at;
    while (end < lines.length && QUOTE.test(spelt[end])) end += 1;
    const inner = lines.slice(at, end).map((line, place) => stripped(line, QUOTE.exec(spelt[at + place])[0].length));
    return { made: { kind: "quote", lines: [], items: [parse(text, inner, depth + 1)] }, next: end };
  }
  return ITEM.test(spelt[at]) ? listed(text, lines, spelt, at, depth) : null;
}

function listed(text, lines, spelt, at, depth) {
  const ordered = /\d/.test(ITEM.exec(spelt[at])[2]);
  const items = [];
  let place = at;
  let own = [];
  let width = 0;
  const close = () => own.length && items.push(parse(text, own, depth + 1));
  for (; place < lines.length; place += 1) {
    const line = spelt[place];
    const indent = line.length - line.trimStart().length;
    const item = ITEM.exec(line);
    if (item && !RULE.test(line) && (!own.length || indent < width)) {
      if (/\d/.test(item[2]) !== ordered) break;
      close();
      width = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
      own = [stripped(lines[place], Math.min(width, line.length))];
    } else if (!line.trim()) {
      if (place + 1 < lines.length && spelt[place + 1].trim() && !belongs(spelt[place + 1], width)) break;
      own.push(lines[place]);
    } else if (indent >= Math.min(width, 2) || (spelt[place - 1].trim() && !starts(line))) {
      own.push(stripped(lines[place], Math.min(indent, width)));
    } else break;
  }
  close();
  const first = ordered ? Number.parseInt(ITEM.exec(spelt[at])[2], 10) : 0;
  return { made: { kind: ordered ? "numbers" : "list", lines: [], items, first }, next: place };
}

/** Whether a line after an empty one still belongs to a list. */
function belongs(line, width) {
  return ITEM.test(line) || line.length - line.trimStart().length >= Math.min(width, 2);
}

function running(lines, spelt, at) {
  const table = TABLE.test(spelt[at]);
  let end = at + 1;
  while (end < lines.length && spelt[end].trim() && TABLE.test(spelt[end]) === table && (table || !starts(spelt[end]))) end += 1;
  return { made: { kind: table ? "table" : "paragraph", lines: lines.slice(at, end) }, next: end };
}

function starts(line) {
  return [FENCE, HEADING, RULE, ITEM, QUOTE].some((pattern) => pattern.test(line));
}

function stripped(line, length) {
  return { start: Math.min(line.start + length, line.end), end: line.end };
}

/**
 * @typedef {{start: number, end: number, style: string}|{style: string, inner: Span[]}} Span
 */

/**
 * Emphasis and code in `[from, to)` of a text.
 * @returns {Span[]}
 */
export function spansOf(text, from, to, depth = 0) {
  const spans = [];
  const hopeless = new Set();
  let plain = from;
  const flush = (end) => end > plain && spans.push({ start: plain, end, style: "" });
  for (let at = from; at < to; ) {
    const mark = markAt(text, at, to);
    if (mark === "\\") {
      flush(at);
      plain = at + 1;
      at += 2;
      continue;
    }
    const close = mark && depth < MAX_DEPTH && !hopeless.has(mark) ? closing(text, mark, at, to) : -1;
    if (mark && close < 0 && opens(text, mark, at, to)) hopeless.add(mark);
    if (close < 0) {
      at += mark ? mark.length : 1;
      continue;
    }
    flush(at);
    const inside = [at + mark.length, close];
    if (mark[0] === "`") spans.push({ start: inside[0], end: inside[1], style: "code" });
    else spans.push({ style: mark.length === 2 ? "strong" : "em", inner: spansOf(text, ...inside, depth + 1) });
    at = plain = close + mark.length;
  }
  flush(to);
  return spans;
}

function markAt(text, at, to) {
  const one = text[at];
  if (one === "\\") return at + 1 < to && /[\\`*_{}[\]()#+\-.!|>~]/.test(text[at + 1]) ? "\\" : "";
  if (one === "`") {
    let end = at;
    while (end < to && text[end] === "`") end += 1;
    return text.slice(at, end);
  }
  if (one !== "*" && one !== "_") return "";
  return text[at + 1] === one && at + 1 < to ? one + one : one;
}

function opens(text, mark, at, to) {
  if (mark[0] === "`") return true;
  const after = at + mark.length < to ? text[at + mark.length] : " ";
  return /\S/.test(after) && !(mark[0] === "_" && wordly(text[at - 1]));
}

function closing(text, mark, at, to) {
  if (!opens(text, mark, at, to)) return -1;
  for (let place = text.indexOf(mark, at + mark.length); place >= 0; ) {
    if (place + mark.length > to) return -1;
    const end = place + mark.length;
    const exact = text[place - 1] !== mark[0] && (end >= to || text[end] !== mark[0]);
    const fits = mark[0] === "`" || (/\S/.test(text[place - 1]) && !(mark[0] === "_" && end < to && wordly(text[end])));
    if (exact && fits && place > at + mark.length) return place;
    while (text[place] === mark[0]) place += 1;
    place = text.indexOf(mark, place);
  }
  return -1;
}

function wordly(one) {
  return one !== undefined && /[\p{L}\p{N}]/u.test(one);
}
