// SPDX-License-Identifier: Apache-2.0
// What else a token could have been: shown where it is pointed at, or reached by the arrow keys.

import { byId, el } from "./dom.js";
import { percent, shownToken } from "./words.js";

/** @typedef {import("./tokens.js").TokenText} TokenText */

const LINGER_MS = 120;
const GAP = 6;
// Bounds of a token's probability, by which unlikely ones are tinted.
const TINTS = [0.5, 0.2, 0.05];

/**
 * Shows the probabilities of tokens inside `place`.
 * @param {HTMLElement} place
 * @param {(token: HTMLElement) => TokenText} textOf the tokens of the answer that an element is part of
 */
export function showProbabilities(place, textOf) {
  const box = byId("probabilities");
  let shown = null;
  let leaving = 0;
  const pointer = { x: Number.NaN, y: Number.NaN };

  const hide = () => {
    clearTimeout(leaving);
    shown?.removeAttribute("aria-describedby");
    shown?.classList.remove("pointed");
    shown = null;
    box.hidden = true;
  };
  const show = (token) => {
    clearTimeout(leaving);
    if (token === shown) return;
    hide();
    const text = textOf(token);
    const segment = text.segments[Number(token.dataset.segment)];
    if (!segment) return;
    box.replaceChildren(...text.entries.slice(segment.first, segment.last + 1).map(table));
    box.hidden = false;
    shown = token;
    token.classList.add("pointed");
    token.setAttribute("aria-describedby", box.id);
    settle(box, token.getClientRects()[0] ?? token.getBoundingClientRect());
  };
  const hideSoon = () => {
    clearTimeout(leaving);
    leaving = setTimeout(hide, LINGER_MS);
  };
  const tokenOf = (event) => event.target.closest?.(".token");

  place.addEventListener("pointerover", (event) => {
    const token = tokenOf(event);
    // Text that came to lie under a pointer at rest was not pointed at.
    const rests = event.screenX === pointer.x && event.screenY === pointer.y;
    if (token && !rests) show(token);
    else if (shown && shown !== document.activeElement) hideSoon();
  });
  addEventListener("pointermove", ({ screenX, screenY }) => Object.assign(pointer, { x: screenX, y: screenY }));
  place.addEventListener("pointerleave", hideSoon);
  // Who goes on to the figures themselves wants to read them.
  box.addEventListener("pointerenter", () => clearTimeout(leaving));
  box.addEventListener("pointerleave", hideSoon);
  place.addEventListener("focusin", (event) => (tokenOf(event) ? show(tokenOf(event)) : hide()));
  place.addEventListener("focusout", hide);
  place.addEventListener("scroll", hide);
  place.addEventListener("keydown", (event) => step(event));
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
  return { hide };
}

/** The class that tints a segment's tokens; "" for what was likely. */
export function tintOf(text, segment) {
  const { first, last } = text.segments[segment];
  const least = Math.min(...text.entries.slice(first, last + 1).map((entry) => entry.logprob));
  const level = TINTS.filter((bound) => Math.exp(least) < bound).length;
  return level ? `tint-${level}` : "";
}

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };

/** Arrow keys go from token to token inside an answer. The answer itself is the one stop of the tab key. */
function step(event) {
  const words = event.target.closest(".words");
  if (!words || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const tokens = [...words.querySelectorAll(".token")];
  if (!tokens.length) return;
  const at = tokens.indexOf(event.target);
  if (at < 0 && event.target !== words) return;
  const last = tokens.length - 1;
  const to = { Home: 0, End: last }[event.key] ?? (STEPS[event.key] && (at < 0 ? 0 : at + STEPS[event.key]));
  if (to === undefined) return;
  event.preventDefault();
  tokens[Math.min(Math.max(to, 0), last)].focus();
}

function table(entry) {
  const rows = [...entry.top_logprobs].sort((one, other) => other.logprob - one.logprob);
  const own = rows.find((row) => row.token === entry.token && String(row.bytes) === String(entry.bytes));
  if (!own) rows.push(entry);
  const rest = 1 - rows.reduce((sum, row) => sum + Math.exp(row.logprob), 0);
  const lines = rows.map((row) => line(shownToken(row.token, row.bytes), Math.exp(row.logprob), row === (own ?? entry)));
  if (rest > 0.0005 && entry.top_logprobs.length) lines.push(line("all others", rest, false, "others"));
  return el("ul", { "aria-label": "Probabilities" }, ...lines);
}

function line(name, share, chosen, kind = "") {
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  bar.style.inlineSize = `${Math.max(share * 100, 0.5)}%`;
  const label = el("bdi", { class: "name" }, name);
  if (chosen) label.append(el("span", { class: "unseen" }, " (chosen)"));
  return el("li", { class: `${chosen ? "chosen" : ""} ${kind}`.trim() || null }, bar, label, el("span", { class: "share" }, percent(share)));
}

/** Puts the box under what it is about, or above where there is no room. */
function settle(box, about) {
  const { width, height } = box.getBoundingClientRect();
  const left = Math.min(Math.max(about.left, GAP), document.documentElement.clientWidth - width - GAP);
  const below = about.bottom + GAP;
  const top = below + height > innerHeight - GAP && about.top > height + GAP ? about.top - height - GAP : below;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}
