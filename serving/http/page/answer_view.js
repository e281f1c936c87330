// SPDX-License-Identifier: Apache-2.0
// One message on the page.

import { el, icon, say } from "./dom.js";
import { tintOf } from "./probabilities.js";
import { render, renderPlain } from "./render.js";
import { begun, tokenCount, tokensOf } from "./stream.js";
import { cutter } from "./tokens.js";
import { counted, rate, seconds } from "./words.js";

/** @typedef {import("./tree.js").Message} Message */

const ENDS = {
  length: "cut at the token limit",
  stopped: "stopped",
  failed: "broke off",
  tool_calls: "asks for a tool",
  content_filter: "held back",
  abort: "ended by the server",
};
const AGAIN = "M15.5 8a6 6 0 1 0 .3 3.5M16 4v4h-4";
const SAME = "M4 8h12M4 12h12";
const COPY = "M7 7h9v9H7zM4 13V4h9";
const EDIT = "M4 16l1-4 8-8 3 3-8 8z";
const KEYS_HINT = "Arrow keys go through the tokens and their probabilities";

/**
 * The element of a message, and what redraws it.
 * @param {Message} message
 * @param {{number: number, place: number, of: number}} where its number, and its place among its siblings
 * @param {Record<string, (message: Message, element: HTMLElement) => void>} on again, same, edit, older, newer, key
 */
export function messageView(message, where, on) {
  return message.role === "user" ? userView(message, where, on) : answerView(message, where, on);
}

function userView(message, where, on) {
  const said = el("div", { class: "said", dir: "auto" });
  said.textContent = message.content;
  const node = el("article", { class: "message user", "data-id": message.id });
  const tools = el("div", { class: "tools" }, ...branches(message, where, on, node), button("Edit", EDIT, () => on.edit(message, node)));
  node.append(el("h3", { class: "unseen" }, `You, message ${where.number}`), said, tools);
  return { node, update() {}, updateCheck() {} };
}

function answerView(message, where, on) {
  const thought = el("div", { class: "words" });
  const thinking = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), thought);
  const words = el("div", { class: "words", role: "group", "aria-label": "Answer" });
  const calls = el("div", { class: "calls" });
  const facts = el("p", { class: "facts" });
  const check = el("p", { class: "verdict", hidden: true });
  const fault = el("div", { class: "fault-box", hidden: true });
  const tools = el("div", { class: "tools" });
  const node = el("article", { class: "message answer", "data-id": message.id });
  node.append(el("h3", { class: "unseen" }, `Answer ${where.number}`), thinking, words, calls, fault, el("footer", {}, facts, tools), check);
  const parts = { node, thought, thinking, words, calls, facts, check, fault, tools };
  let settled = false;
  const update = (whole = false) => {
    const running = message.state === "running";
    drawWords(message, parts, whole || !running);
    drawFacts(message, parts);
    if (settled && !whole) return;
    settled = !running;
    node.setAttribute("aria-busy", String(running));
    node.classList.toggle("running", running);
    drawCalls(message, calls);
    drawFault(message, parts, on);
    drawCheck(message, check);
    tools.replaceChildren(...(running ? [] : answerTools(message, where, on, node)));
  };
  update(true);
  return { node, update, updateCheck: () => drawCheck(message, check) };
}

function answerTools(message, where, on, node) {
  const found = branches(message, where, on, node);
  if (message.fault && !message.content) return found;
  return [
    ...found,
    button("Copy", COPY, (event) => copy(message.content, event.currentTarget)),
    button("Regenerate", AGAIN, () => on.again(message, node), "Ask again with a fresh seed"),
    button("Same seed", SAME, () => on.same(message, node), "Run again with the same seed and see whether the answer is the same"),
  ];
}

function branches(message, { place, of }, on, node) {
  if (of < 2) return [];
  const turn = (name, path, action, possible) =>
    el("button", { type: "button", class: "plain", "aria-label": name, title: name, "aria-disabled": possible ? null : "true", onclick: () => possible && action(message, node) }, icon(path));
  return [
    el(
      "span",
      { class: "branches", role: "group", "aria-label": "Versions" },
      turn("Version before", "M12 5l-5 5 5 5", on.older, place > 0),
      el("span", {}, `${place + 1} of ${of}`),
      turn("Version after", "M8 5l5 5-5 5", on.newer, place < of - 1),
    ),
  ];
}

function drawWords(message, { words, thought, thinking }, whole) {
  const tokens = tokensOf(message);
  const known = tokens.segments.length > 0;
  render(words, message.content, cutter(known ? tokens.placedIn(message.content) : []), whole);
  thinking.hidden = !message.reasoning;
  if (message.reasoning) renderPlain(thought, message.reasoning, cutter(known ? tokens.placedIn(message.reasoning) : []));
  for (const place of [words, thought]) {
    for (const token of place.querySelectorAll(".token:not([data-tinted])")) {
      const tint = tintOf(tokens, Number(token.dataset.segment));
      if (tint) token.classList.add(tint);
      token.dataset.tinted = "";
    }
    if (place.querySelector(".token")) {
      place.tabIndex = 0;
      place.setAttribute("role", "group");
      place.setAttribute("aria-label", `${place === words ? "Answer" : "Reasoning"}. ${KEYS_HINT}`);
    }
  }
}

function drawFacts(message, { facts }) {
  const tokens = tokenCount(message);
  const { first = 0, whole: last = 0 } = message.times ?? {};
  const pace = tokens > 1 && last > first ? `${rate((tokens - 1) / ((last - first) / 1000))} tokens/s` : "";
  const seed = message.asked?.seed;
  const told = [
    seed === undefined ? "" : `seed ${seed}`,
    tokens ? counted(tokens, "token") : "",
    pace,
    message.times ? `first after ${seconds(first / 1000)}` : "",
    ENDS[message.state] ?? "",
  ];
  // A number and its unit stay on one line.
  const parts = told.filter(Boolean).map((one) => one.replaceAll(" ", "\u00a0"));
  say(facts, message.fault && !begun(message) ? "" : parts.join(" · "));
}

function drawCalls(message, place) {
  const made = (message.calls ?? []).filter(Boolean).map((call) => {
    const given = el("pre", { tabindex: "0", role: "group", "aria-label": `Arguments of ${call.name}` }, el("code", {}, pretty(call.arguments)));
    return el("div", { class: "call" }, el("p", {}, "Calls ", el("code", {}, call.name || "(no name)")), given);
  });
  place.replaceChildren(...made);
}

function drawFault(message, { fault, node }, on) {
  fault.hidden = !message.fault;
  if (!message.fault) return;
  const again = el("button", { type: "button", class: "small", onclick: () => on.retry(message, node) }, "Try again");
  fault.replaceChildren(el("p", { dir: "auto" }, message.fault), again);
  const waits = () => Math.ceil(((message.retryAt ?? 0) - Date.now()) / 1000);
  const tick = () => {
    const left = waits();
    again.setAttribute("aria-disabled", String(left > 0));
    say(again, left > 0 ? `Try again in ${left} s` : "Try again");
    if (left > 0 && (again.isConnected || !node.isConnected)) setTimeout(tick, 250);
  };
  tick();
}

function drawCheck(message, place) {
  place.hidden = !message.check;
  if (!message.check) return;
  const { same, about } = message.check;
  place.classList.toggle("same", same === true);
  place.classList.toggle("different", same === false);
  say(place, about);
}

function button(name, path, action, title = name) {
  return el("button", { type: "button", class: "plain", title, onclick: action }, icon(path), el("span", {}, name));
}

async function copy(text, target) {
  const label = target.querySelector("span");
  try {
    await navigator.clipboard.writeText(text);
    say(label, "Copied");
  } catch {
    say(label, "Not allowed");
  }
  setTimeout(() => say(label, "Copy"), 1500);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
