// SPDX-License-Identifier: Apache-2.0
// What can be done with a conversation: send, stop, ask again, run again with the same seed, edit, turn to a branch.

import { announce, byId, el } from "./dom.js";
import { compared } from "./same.js";
import { asked, freshSeed } from "./sampling.js";
import { keep } from "./store.js";
import { answer, tokenCount } from "./stream.js";
import { Transcript } from "./transcript.js";
import { add, asRequest, choose, find, freshId, remove, shown, siblings, upTo } from "./tree.js";
import { counted } from "./words.js";

/** @typedef {import("./tree.js").Message} Message */

/** The conversation that is open, and the one request that may be under way. */
export class Talk {
  /**
   * @param {{model: () => {id: string, fingerprint: string}, onRun: (running: boolean) => void,
   *   onKept: (kept: boolean) => void, onLocked: () => void}} around
   */
  constructor(around) {
    this.around = around;
    /** @type {AbortController|null} */
    this.run = null;
    this.transcript = new Transcript({
      again: (message) => this.again(message),
      same: (message) => this.same(message),
      retry: (message) => this.retry(message),
      edit: (message, node) => this.edit(message, node),
      older: (message, node) => this.turn(message, -1, node),
      newer: (message, node) => this.turn(message, 1, node),
    });
  }

  /** Shows a conversation. */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.transcript.show(conversation);
  }

  /** Keeps what there is of an answer under way, before the page goes. */
  keepNow() {
    if (!this.run) return;
    keep(this.conversation);
    // Else it would count as one that the server broke off.
    this.run.abort();
  }

  /** Sends a message after those that are shown. Whether it went. */
  send(content) {
    const request = this.run ? null : asked();
    if (!request) return false;
    const last = shown(this.conversation).at(-1);
    // An answer that failed before its first word is no part of what was said.
    const under = last?.fault && !last.content ? find(this.conversation, last.parent) : last;
    if (under !== last) remove(this.conversation, last);
    const message = add(this.conversation, under?.id ?? null, { role: "user", content });
    this.ask(message, request);
    return true;
  }

  /** Ends what is under way. Whether there was anything. */
  stop() {
    const was = this.run !== null;
    this.run?.abort();
    return was;
  }

  /** Another answer to the same, with a seed that is not the last one. */
  again(message) {
    const request = this.run ? null : asked();
    if (!request) return;
    const used = siblings(this.conversation, message).map((one) => one.asked?.seed);
    if (used.includes(request.asked.seed)) request.asked.seed = freshSeed();
    this.ask(find(this.conversation, message.parent), request);
  }

  /** The same once more, in the place of an answer that failed. */
  retry(message) {
    if (this.run || (message.retryAt ?? 0) > Date.now()) return;
    const { asked: said, system } = message;
    remove(this.conversation, message);
    this.ask(find(this.conversation, message.parent), { asked: said, system });
  }

  /** Asks for an answer to a message of the user. */
  async ask(question, { asked: said, system }) {
    const { id: model, fingerprint } = this.around.model();
    const fields = { role: "assistant", asked: said, system, model, fingerprint, state: "running" };
    const message = add(this.conversation, question.id, fields);
    const { conversation } = this;
    this.transcript.show(conversation);
    // What had the focus may be gone: the button that stops is where it is wanted next.
    if (document.activeElement === document.body) byId("send").focus();
    announce("The answer begins.");
    const error = await this.running(this.body(message), message, () => this.transcript.changed(message));
    message.retryAt = error?.retryAfterS ? Date.now() + error.retryAfterS * 1000 : 0;
    if (error?.status === 401) this.around.onLocked();
    this.transcript.changed(message, true);
    this.finished(conversation);
    announce(told(message));
  }

  /** Runs an answer again, with its own settings and seed, and says beside it whether the same came out. */
  async same(message) {
    if (this.run) return;
    const { conversation } = this;
    const total = tokenCount(message);
    const second = { id: freshId(), role: "assistant", content: "" };
    const report = (check) => {
      message.check = check;
      this.transcript.checked(message);
    };
    report({ same: null, about: "Running it again with the same seed…" });
    announce("Running it again with the same seed.");
    let cutShort = false;
    const error = await this.running(this.body(message), second, () => {
      const far = tokenCount(second);
      if (message.check.far !== far) report({ same: null, far, about: `Running it again: ${far} of ${counted(total, "token")}` });
      const enough = message.state === "stopped" && second.content.length >= message.content.length;
      if (enough && second.entries.length >= message.entries.length && second.state === "running") {
        cutShort = true;
        this.stop();
      }
    });
    if (error) report({ same: null, about: `It could not be run again. ${error.message}` });
    else if (second.state === "stopped" && !cutShort) report({ same: null, about: "Stopped before it could be told." });
    else report(this.verdict(message, second, cutShort));
    if (error?.status === 401) this.around.onLocked();
    this.finished(conversation);
    announce(message.check.about);
  }

  verdict(message, second, cutShort) {
    const check = compared(message, second, cutShort);
    const { fingerprint } = this.around.model();
    const moved = message.fingerprint && fingerprint && message.fingerprint !== fingerprint;
    return !check.same && moved ? { ...check, about: `${check.about} The server has other weights now.` } : check;
  }

  /** A place to write a message anew; what is sent from there is a branch. */
  edit(message, node) {
    if (this.run) return;
    const field = el("textarea", { "aria-label": "Your message, changed", rows: "3" });
    field.value = message.content;
    const leave = () => {
      this.transcript.show(this.conversation);
      this.transcript.nodeOf(message)?.querySelector(".tools button:last-child")?.focus();
    };
    const send = () => {
      const content = field.value.trim();
      const request = content && !this.run ? asked() : null;
      if (!request) return;
      this.ask(add(this.conversation, message.parent, { role: "user", content }), request);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault();
        leave();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const row = el(
      "div",
      { class: "row end" },
      el("button", { type: "button", onclick: leave }, "Cancel"),
      el("button", { type: "button", class: "primary", onclick: send }, "Send as a branch"),
    );
    node.classList.add("editing");
    node.replaceChildren(field, row);
    field.focus();
  }

  turn(message, by, node) {
    if (this.run) return;
    const all = siblings(this.conversation, message);
    const next = all[all.indexOf(message) + by];
    choose(this.conversation, next);
    const label = node.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.transcript.show(this.conversation);
    const shownNode = this.transcript.nodeOf(next);
    shownNode.scrollIntoView({ block: "nearest" });
    if (label) shownNode.querySelector(`[aria-label="${label}"]`)?.focus();
    this.around.onKept(keep(this.conversation));
  }

  async running(body, message, changed) {
    this.run = new AbortController();
    const { run } = this;
    this.around.onRun(true);
    const error = await answer(body, message, run.signal, changed);
    if (this.run === run) this.run = null;
    this.around.onRun(this.run !== null);
    return error;
  }

  body(message) {
    const before = upTo(this.conversation, find(this.conversation, message.parent));
    return { model: message.model || undefined, messages: asRequest(before, message.system), ...message.asked };
  }

  finished(conversation) {
    conversation.at = Date.now();
    this.around.onKept(keep(conversation));
  }
}

const MOST_READ = 1000;

/** What a screen reader is told of an answer when it is there. */
function told(message) {
  if (message.fault) return message.fault;
  const how = message.state === "stopped" ? "Stopped" : "The answer is there";
  const said = message.content.length > MOST_READ ? `${message.content.slice(0, MOST_READ)}…` : message.content;
  return `${how}, ${counted(tokenCount(message), "token")}. ${said}`;
}
