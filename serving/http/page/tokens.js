// SPDX-License-Identifier: Apache-2.0
// Which token said which characters. Tokens are bytes: one may hold half a character, or several.

/** @typedef {import("./tree.js").Entry} Entry */

const ENCODER = new TextEncoder();

/** @typedef {{start: number, end: number, first: number, last: number}} Segment text `[start, end)` of tokens `first` to `last` */

/** The text that an answer's tokens spell, in segments of whole characters. Tokens are added as they come. */
export class TokenText {
  constructor() {
    /** @type {Entry[]} */
    this.entries = [];
    /** @type {Segment[]} */
    this.segments = [];
    this.text = "";
    // A byte order mark is text like any other here.
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.pending = 0;
  }

  /** @param {Entry[]} entries */
  add(entries) {
    for (const entry of entries) {
      const raw = entry.bytes ? Uint8Array.from(entry.bytes) : ENCODER.encode(entry.token);
      const more = this.decoder.decode(raw, { stream: true });
      this.entries.push(entry);
      if (!more) continue;
      const start = this.text.length;
      this.text += more;
      this.segments.push({ start, end: this.text.length, first: this.pending, last: this.entries.length - 1 });
      this.pending = this.entries.length;
    }
  }

  /**
   * The segments that spell `text`, placed in it: a list as long as `segments`, null where one is no part of it
   * (reasoning, marks of a dialect, the end of the turn).
   * @param {string} text
   * @returns {({start: number, end: number}|null)[]}
   */
  placedIn(text) {
    const base = text ? this.text.lastIndexOf(text) : -1;
    return base < 0 ? this.matched(text) : this.segments.map((segment) => overlap(segment, base, text.length));
  }

  /** Where the text is not to be found in one piece: each segment where it comes next, if it does. */
  matched(text) {
    let place = 0;
    return this.segments.map(({ start, end }) => {
      const own = this.text.slice(start, end);
      if (!own || !text.startsWith(own, place)) return null;
      const found = { start: place, end: place + own.length };
      place = found.end;
      return found;
    });
  }
}

function overlap(segment, base, length) {
  const start = Math.max(segment.start - base, 0);
  const end = Math.min(segment.end - base, length);
  return start < end ? { start, end } : null;
}

/**
 * A function that gives the pieces of `[from, to)` of a text: `{start, end, segment}`, `segment` -1 where no token is
 * known to have said it.
 * @param {({start: number, end: number}|null)[]} places
 */
export function cutter(places) {
  const known = places.map((place, segment) => place && { ...place, segment }).filter(Boolean);
  return (from, to) => {
    const pieces = [];
    let low = 0;
    for (let high = known.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (known[middle].end <= from) low = middle + 1;
      else high = middle;
    }
    let place = from;
    for (; low < known.length && known[low].start < to; low += 1) {
      const { start, end, segment } = known[low];
      if (start > place) pieces.push({ start: place, end: start, segment: -1 });
      pieces.push({ start: Math.max(start, from), end: Math.min(end, to), segment });
      place = Math.min(end, to);
    }
    if (place < to) pieces.push({ start: place, end: to, segment: -1 });
    return pieces;
  };
}
