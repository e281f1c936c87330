// SPDX-License-Identifier: Apache-2.0
// What stays in this browser: conversations, bounded in number and size, and the settings.

const PREFIX = "metrale.chat.";
const SETTINGS = "metrale.settings";
const CURRENT = "metrale.current";
const MAX_CHATS = 50;
// Browsers give 5 million characters to a site. Probabilities are the most of it and go first.
const MAX_CHARACTERS = 3_000_000;

/** Conversations that are kept, the newest first; what cannot be read is passed over. */
export function conversations() {
  return keys()
    .map((name) => read(name))
    .filter((one) => one && Array.isArray(one.messages) && typeof one.id === "string")
    .map(mended)
    .sort((one, other) => other.at - one.at);
}

/** Keeps a conversation; others make room for it. Whether it could be kept. */
export function keep(conversation) {
  if (!conversation.messages.length) return true;
  const text = JSON.stringify(conversation);
  const own = PREFIX + conversation.id;
  makeRoom(own, text.length);
  if (write(own, text)) return true;
  return write(own, JSON.stringify(bared(conversation))) === true;
}

/** Forgets a conversation. */
export function forget(id) {
  attempt(() => localStorage.removeItem(PREFIX + id));
}

/** Forgets all of them. */
export function forgetAll() {
  for (const name of keys()) attempt(() => localStorage.removeItem(name));
}

/** Which conversation was open last. */
export function current() {
  return attempt(() => localStorage.getItem(CURRENT)) ?? "";
}

/** Notes which one is open. */
export function setCurrent(id) {
  attempt(() => localStorage.setItem(CURRENT, id));
}

/** The settings as they were left. */
export function settings() {
  return read(SETTINGS) ?? {};
}

/** Keeps the settings. */
export function setSettings(values) {
  write(SETTINGS, JSON.stringify(values));
}

/** Calls back when another tab changed a conversation. */
export function onOthersChange(changed) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) changed(event.key?.slice(PREFIX.length) ?? null);
  });
}

function makeRoom(own, size) {
  const others = keys()
    .filter((name) => name !== own)
    .map((name) => ({ name, size: attempt(() => localStorage.getItem(name).length) ?? 0, at: read(name)?.at ?? 0 }))
    .sort((one, other) => one.at - other.at);
  let total = size + others.reduce((sum, one) => sum + one.size, 0);
  for (const one of others) {
    if (total <= MAX_CHARACTERS) break;
    const bare = withoutEntries(one.name);
    write(one.name, bare);
    total += bare.length - one.size;
    one.size = bare.length;
  }
  while (others.length && (total > MAX_CHARACTERS || others.length >= MAX_CHATS)) {
    const oldest = others.shift();
    attempt(() => localStorage.removeItem(oldest.name));
    total -= oldest.size;
  }
}

function withoutEntries(name) {
  const conversation = read(name);
  return conversation?.messages ? JSON.stringify(bared(conversation)) : "";
}

function bared(conversation) {
  return { ...conversation, messages: conversation.messages.map((message) => ({ ...message, entries: undefined })) };
}

/** An answer that was under way when the page went is one that was stopped. */
function mended(conversation) {
  for (const message of conversation.messages) if (message.state === "running") message.state = "stopped";
  conversation.chosen ??= {};
  return conversation;
}

function keys() {
  return attempt(() => Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) ?? [];
}

function read(name) {
  return attempt(() => JSON.parse(localStorage.getItem(name) ?? "null"));
}

function write(name, text) {
  return attempt(() => {
    localStorage.setItem(name, text);
    return true;
  });
}

/** What the action gives; undefined where the browser keeps nothing for us, or no more. */
function attempt(action) {
  try {
    return action();
  } catch {
    return undefined;
  }
}
