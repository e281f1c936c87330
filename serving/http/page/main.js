// SPDX-License-Identifier: Apache-2.0
// The page put together.

import { ApiError, key, models, useKey } from "./api.js";
import { Chats } from "./chats.js";
import { announce, byId, fill, say } from "./dom.js";
import { openDrawers } from "./drawers.js";
import { Live, showState } from "./live.js";
import { openSampling } from "./sampling.js";
import { Talk } from "./talk.js";
import { shown } from "./tree.js";
import { count } from "./words.js";

const prompt = /** @type {HTMLTextAreaElement} */ (byId("prompt"));
const send = byId("send");
const chooser = /** @type {HTMLSelectElement} */ (byId("model"));
/** What the server tells of its model. */
let card = null;
let state = "";

const drawers = openDrawers();
openSampling();

const talk = new Talk({
  model: () => ({ id: chooser.value || card?.id || "", fingerprint: card?.fingerprint ?? "" }),
  onRun: (running) => {
    say(send, running ? "Stop" : "Send");
    send.classList.toggle("stop", running);
    showContext();
  },
  onKept: (kept) => {
    chats.draw();
    showContext();
    if (!kept) announce("This browser keeps no more; export the chat to have it later.");
  },
  onLocked: () => askForKey(key() ? "The server does not know this key." : ""),
});

const chats = new Chats((conversation) => {
  talk.open(conversation);
  drawers.close("chats", false);
  showContext();
});

const live = new Live(
  (now, stats) => {
    const was = state;
    state = now;
    showState(now, stats);
    const isOther = Boolean(stats?.model) && stats.model.id !== card?.id;
    if (stats?.model) card = stats.model;
    if (now !== "locked" && now !== "unreachable") byId("key-form").hidden = true;
    if (was && was !== now) announce(`The server: ${byId("state-text").textContent}.`);
    if (isOther || (now === "serving" && was !== now)) listModels();
    showContext();
  },
  () => askForKey(key() ? "The server does not know this key." : ""),
);

/** Asks the server what it serves. A single model needs no choice. */
async function listModels() {
  try {
    const found = await models();
    const before = chooser.value;
    chooser.replaceChildren(...found.map((one) => new Option(one.id, one.id)));
    if (found.some((one) => one.id === before)) chooser.value = before;
    chooser.hidden = found.length < 2;
    say(byId("model-name"), found.length === 1 ? found[0].id : "");
    byId("model-name").hidden = found.length !== 1;
    card ??= found[0] ?? null;
    showContext();
  } catch (error) {
    if (error.status === 401) askForKey("");
    else if (!(error instanceof ApiError)) throw error;
  }
}

/** How much of the context the conversation took at its last answer. */
function showContext() {
  const most = card?.max_model_len;
  const last = shown(chats.now).findLast((one) => one.usage);
  const used = last ? last.usage.prompt_tokens + last.usage.completion_tokens : 0;
  byId("context").hidden = !most;
  if (!most) return;
  const words = `${count(used)} of ${count(most)} tokens`;
  say(byId("context-text"), words);
  byId("context-meter").setAttribute("aria-valuemax", "100");
  fill(byId("context-meter"), used / most, words);
  byId("context").classList.toggle("scarce", used > 0.8 * most);
}

function askForKey(fault) {
  const form = byId("key-form");
  say(byId("key-fault"), fault);
  if (!form.hidden) return;
  form.hidden = false;
  byId("forget-key").hidden = !key();
  if (!fault) announce("This server asks for a key.");
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = /** @type {HTMLInputElement} */ (byId("key"));
  if (!field.value.trim()) return;
  useKey(field.value.trim());
  field.value = "";
  byId("key-form").hidden = true;
  state = "";
  live.soon(0);
  listModels();
  prompt.focus();
});
byId("forget-key").addEventListener("click", () => {
  useKey("");
  byId("forget-key").hidden = true;
  say(byId("key-fault"), "");
  byId("key").focus();
});

function sendNow() {
  const content = prompt.value.trim();
  if (!content || !talk.send(content)) return;
  prompt.value = "";
  grow();
}

function grow() {
  prompt.style.blockSize = "auto";
  prompt.style.blockSize = `${prompt.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!talk.stop()) sendNow();
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  // Enter also ends the composing of a character, which sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  sendNow();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && talk.stop()) event.preventDefault();
}, { capture: true });
byId("sampling").addEventListener("wanted", (event) => {
  drawers.reveal("panel");
  event.target.focus();
});
// Requests may break off between the two.
for (const leaving of ["beforeunload", "pagehide"]) addEventListener(leaving, () => talk.keepNow());

chats.restore();
live.soon(0);
// On a phone a keyboard that nobody asked for would cover half of the page.
if (matchMedia("(hover: hover)").matches) prompt.focus();
