// SPDX-License-Identifier: Apache-2.0
// The list of conversations: open, new, export, delete.

import { byId, el } from "./dom.js";
import * as store from "./store.js";
import { newConversation, titleOf } from "./tree.js";

/** Keeps the list; `open(conversation)` shows one. */
export class Chats {
  constructor(open) {
    this.open = open;
    byId("new-chat").addEventListener("click", () => this.begin());
    byId("export").addEventListener("click", () => download(this.now));
    byId("delete-chat").addEventListener("click", () => this.drop());
    byId("clear-chats").addEventListener("click", () => this.clear());
    store.onOthersChange((id) => id !== this.now.id && this.draw());
  }

  /** Shows the conversation that was open last. */
  restore() {
    const all = store.conversations();
    this.show(all.find((one) => one.id === store.current()) ?? all[0] ?? newConversation());
  }

  /** Draws the list anew. */
  draw() {
    const kept = store.conversations();
    const all = kept.some((one) => one.id === this.now.id) ? kept : [this.now, ...kept];
    const items = all.map((one) => {
      const own = one.id === this.now.id;
      const title = titleOf(own ? this.now : one);
      const choose = () => {
        if (!own) this.show(one);
        byId("prompt").focus();
      };
      return el("li", {}, el("button", { type: "button", class: "chat", dir: "auto", "aria-current": own ? "true" : null, onclick: choose }, title));
    });
    byId("chat-list").replaceChildren(...items);
  }

  show(conversation) {
    this.now = conversation;
    store.setCurrent(conversation.id);
    this.open(conversation);
    this.draw();
  }

  begin() {
    this.show(newConversation());
    byId("prompt").focus();
  }

  async drop() {
    if (this.now.messages.length && !(await sure(`Delete “${titleOf(this.now)}”? It is kept nowhere else.`))) return;
    // An answer under way ends with it, and must not bring it back.
    this.now.messages = [];
    store.forget(this.now.id);
    this.show(store.conversations()[0] ?? newConversation());
  }

  async clear() {
    if (!(await sure("Delete all chats from this browser? They are kept nowhere else."))) return;
    this.now.messages = [];
    store.forgetAll();
    this.show(newConversation());
  }
}

/** Whether the user means it. */
function sure(question) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("ask"));
  byId("ask-text").textContent = question;
  dialog.returnValue = "";
  return new Promise((resolve) => {
    byId("ask-no").onclick = () => dialog.close("");
    byId("ask-yes").onclick = () => dialog.close("yes");
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
    dialog.showModal();
    byId("ask-no").focus();
  });
}

function download(conversation) {
  const about = { format: "metrale-chat-1", exported: new Date().toISOString(), title: titleOf(conversation) };
  const blob = new Blob([JSON.stringify({ ...about, ...conversation }, null, 2)], { type: "application/json" });
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: `chat-${conversation.id}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
