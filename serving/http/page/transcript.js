// SPDX-License-Identifier: Apache-2.0
// The messages that are shown, and the scrolling along with what comes.

import { messageView } from "./answer_view.js";
import { byId, el } from "./dom.js";
import { showProbabilities } from "./probabilities.js";
import { tokensOf } from "./stream.js";
import { find, shown, siblings } from "./tree.js";

// Within so many pixels of the end a reader is taken along.
const NEAR = 80;
// Of the time, drawing takes at most one part in so many.
const SHARE = 4;

/** Draws a conversation, and one message of it anew when that changes. */
export class Transcript {
  /** @param {Record<string, Function>} on what the buttons of a message do */
  constructor(on) {
    this.on = on;
    this.place = byId("transcript");
    this.toEnd = byId("to-end");
    /** @type {Map<string, {node: HTMLElement, update: (whole?: boolean) => void, updateCheck: () => void}>} */
    this.views = new Map();
    this.following = true;
    this.due = null;
    this.notBefore = 0;
    this.popup = showProbabilities(this.place, (token) => {
      const id = token.closest(".message").dataset.id;
      return tokensOf(find(this.conversation, id));
    });
    this.place.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.toEnd.addEventListener("click", () => {
      this.follow();
      byId("prompt").focus();
    });
  }

  /** Shows a conversation, all of it anew. */
  show(conversation) {
    this.conversation = conversation;
    this.popup.hide();
    this.views.clear();
    const path = shown(conversation);
    let answers = 0;
    let asked = 0;
    const nodes = path.map((message) => {
      const all = siblings(conversation, message);
      const number = message.role === "user" ? (asked += 1) : (answers += 1);
      const view = messageView(message, { number, place: all.indexOf(message), of: all.length }, this.on);
      this.views.set(message.id, view);
      return view.node;
    });
    this.place.replaceChildren(...(nodes.length ? nodes : [welcome()]));
    this.follow();
  }

  /** A message has more in it; it is drawn soon, and at once where it is `complete`. */
  changed(message, complete = false) {
    const view = this.views.get(message.id);
    if (!view) return;
    if (complete) {
      cancelAnimationFrame(this.due);
      this.due = null;
      this.draw(view, true);
    } else if (this.due === null) {
      this.due = requestAnimationFrame(() => {
        this.due = null;
        if (performance.now() < this.notBefore) this.changed(message);
        else this.draw(view, false);
      });
    }
  }

  /** What came of running an answer again is told anew; nothing else is touched. */
  checked(message) {
    this.views.get(message.id)?.updateCheck();
    if (this.following) this.place.scrollTop = this.place.scrollHeight;
  }

  /** Goes to the end and stays there. */
  follow() {
    this.following = true;
    this.place.scrollTop = this.place.scrollHeight;
    this.toEnd.hidden = true;
  }

  /** The element of a message. */
  nodeOf(message) {
    return this.views.get(message.id)?.node;
  }

  draw(view, whole) {
    const began = performance.now();
    const focused = whole && view.node.contains(document.activeElement) ? document.activeElement : null;
    view.update(whole);
    // Whoever was reading the tokens of an answer when it ended is put back to its beginning, not to the page's.
    if (focused && !focused.isConnected) view.node.querySelector(".words").focus({ preventScroll: true });
    if (this.following) this.place.scrollTop = this.place.scrollHeight;
    const now = performance.now();
    this.notBefore = now + (now - began) * (SHARE - 1);
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.place;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR;
    this.toEnd.hidden = this.following;
  }
}

function welcome() {
  return el(
    "div",
    { class: "welcome" },
    el("p", { class: "lead" }, "Ask for something."),
    el("p", {}, "The same prompt, settings and seed give the same answer here, however busy the server is. Every answer shows its seed; run it again and see."),
    el("p", {}, "Point at a word of an answer to see how likely it was, and what else was."),
  );
}
