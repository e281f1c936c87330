// SPDX-License-Identifier: Apache-2.0
// One answer on its way: chunks become a message, and its tokens.

import { ApiError, chat } from "./api.js";
import { TokenText } from "./tokens.js";

/** @typedef {import("./tree.js").Message} Message */

/** Tokens of the messages that are shown; they are rebuilt from a message's entries where it was kept. */
const TEXTS = new WeakMap();

/** @param {Message} message */
export function tokensOf(message) {
  let made = TEXTS.get(message);
  if (!made) {
    made = new TokenText();
    made.add(message.entries ?? []);
    TEXTS.set(message, made);
  }
  return made;
}

/**
 * Fills `message` from a request, until its end or until `signal` says to stop. Never raises: what went wrong is in
 * `message.fault`, and the error itself comes back.
 * @param {object} body
 * @param {Message} message
 * @param {AbortSignal} signal
 * @param {() => void} changed
 * @returns {Promise<Error|null>}
 */
export async function answer(body, message, signal, changed) {
  const began = performance.now();
  Object.assign(message, { state: "running", reasoning: "", calls: [], entries: [] });
  try {
    for await (const chunk of chat(body, signal)) {
      if (chunk.usage) message.usage = chunk.usage;
      if (chunk.model) message.model = chunk.model;
      if (chunk.choices?.length) take(message, chunk.choices[0]);
      if (!message.times && begun(message)) message.times = { first: performance.now() - began, whole: 0 };
      if (message.times) message.times.whole = performance.now() - began;
      changed();
    }
    if (message.state === "running") message.state = "stop";
    return null;
  } catch (error) {
    if (error.name === "AbortError") {
      message.state = "stopped";
      return null;
    }
    message.state = "failed";
    message.fault = error instanceof ApiError ? error.message : `This page made a mistake: ${error.message}`;
    if (!(error instanceof ApiError)) console.error(error);
    return error;
  } finally {
    changed();
  }
}

/** How many tokens an answer has, as far as is known. */
export function tokenCount(message) {
  return message.usage?.completion_tokens ?? message.entries?.length ?? 0;
}

/** Whether an answer has anything in it. */
export function begun(message) {
  return Boolean(message.content || message.reasoning || message.entries?.length || message.calls?.length);
}

function take(message, choice) {
  const delta = choice.delta ?? {};
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) takeCall(message, part);
  const entries = (choice.logprobs?.content ?? []).map(lean);
  if (entries.length) {
    tokensOf(message).add(entries);
    message.entries.push(...entries);
  }
  if (choice.finish_reason) message.state = choice.finish_reason;
}

function takeCall(message, part) {
  const place = part.index ?? 0;
  message.calls[place] ??= { id: "", name: "", arguments: "" };
  const call = message.calls[place];
  call.id ||= part.id ?? "";
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

/** An entry without what can be told from the rest of it: it is kept with the conversation. */
function lean({ token, logprob, bytes, top_logprobs }) {
  const spelt = (text, raw) => (text.includes("\ufffd") && raw ? raw : null);
  const top = (top_logprobs ?? []).map((one) => ({
    token: one.token,
    logprob: rounded(one.logprob),
    bytes: spelt(one.token, one.bytes),
  }));
  return { token, logprob: rounded(logprob), bytes: spelt(token, bytes), top_logprobs: top };
}

function rounded(logprob) {
  return Number(logprob.toFixed(6));
}
