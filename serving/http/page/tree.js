// SPDX-License-Identifier: Apache-2.0
// A conversation is a tree of messages: to edit or to ask anew adds a branch, and nothing is lost.

/**
 * @typedef {object} Entry a token with its log-probability, as in OpenAI's chunks
 * @property {string} token
 * @property {number} logprob
 * @property {number[]|null} bytes
 * @property {{token: string, logprob: number, bytes: number[]|null}[]} top_logprobs
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string|null} parent
 * @property {"user"|"assistant"} role
 * @property {string} content
 * @property {number} at when it was made, in milliseconds
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string}[]} [calls]
 * @property {object} [asked] what the request said beside its messages; `seed` is always there
 * @property {string} [system]
 * @property {string} [model]
 * @property {string} [fingerprint] of the weights that answered
 * @property {"running"|"stop"|"length"|"tool_calls"|"stopped"|"failed"|string} [state]
 * @property {string} [fault] what went wrong, in words
 * @property {Entry[]} [entries]
 * @property {object} [usage]
 * @property {{first: number, whole: number}} [times] in milliseconds
 * @property {{same: boolean, about: string}} [check] what came of running it again
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {number} at when it was last changed
 * @property {Message[]} messages in the order in which they were made
 * @property {Record<string, string>} chosen which child is shown, by parent ("" for the first message)
 */

/** An id that no other has. */
export function freshId() {
  const parts = crypto.getRandomValues(new Uint32Array(3));
  return [...parts].map((part) => part.toString(36)).join("");
}

/** @returns {Conversation} one without messages */
export function newConversation() {
  return { id: freshId(), at: Date.now(), messages: [], chosen: {} };
}

/**
 * A message added below `parent` (null: at the top), and shown.
 * @returns {Message}
 */
export function add(conversation, parent, fields) {
  const message = { id: freshId(), parent, content: "", at: Date.now(), ...fields };
  conversation.messages.push(message);
  choose(conversation, message);
  return message;
}

/** Takes away a message that has no answers yet. */
export function remove(conversation, message) {
  conversation.messages = conversation.messages.filter((one) => one !== message);
  if (conversation.chosen[message.parent ?? ""] === message.id) delete conversation.chosen[message.parent ?? ""];
}

/** Shows this one of its siblings. */
export function choose(conversation, message) {
  conversation.chosen[message.parent ?? ""] = message.id;
}

/** A message and those that stand in its place in other branches, oldest first. */
export function siblings(conversation, message) {
  return conversation.messages.filter((one) => one.parent === message.parent);
}

/** The message of that id. */
export function find(conversation, id) {
  return conversation.messages.find((one) => one.id === id);
}

/** The messages that are shown, in order. */
export function shown(conversation) {
  const children = new Map();
  for (const message of conversation.messages) {
    const place = message.parent ?? "";
    // The newest where none was chosen, which is so for damaged data only.
    if (!children.has(place) || conversation.chosen[place] !== children.get(place).id) children.set(place, message);
  }
  const path = [];
  for (let next = children.get(""); next; next = children.get(next.id)) path.push(next);
  return path;
}

/** The messages from the first to this one. */
export function upTo(conversation, message) {
  const path = [];
  for (let one = message; one; one = one.parent && find(conversation, one.parent)) path.unshift(one);
  return path;
}

/** What a request says of these messages: answers that failed before they began are left out. */
export function asRequest(messages, system) {
  const told = messages.filter((one) => one.role === "user" || one.content || !one.fault);
  const turns = told.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

/** A name for a conversation, out of its first message. */
export function titleOf(conversation) {
  const first = conversation.messages.find((one) => one.role === "user")?.content ?? "";
  const line = first.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 57)}…` : line || "New chat";
}
