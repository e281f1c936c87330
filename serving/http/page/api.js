// SPDX-License-Identifier: Apache-2.0
// The server's API, and its errors in words. Everything goes to where the page came from.

import { events } from "./sse.js";
import { seconds } from "./words.js";

const KEY = "metrale.key";

/** What went wrong. `status` is 0 where no answer came; `retryAfterS` is null where no time was named. */
export class ApiError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** The key of this tab, "" without one. */
export function key() {
  try {
    return sessionStorage.getItem(KEY) || "";
  } catch {
    return memory.key;
  }
}

const memory = { key: "" };

/** Keeps a key until the tab is closed; "" forgets it. */
export function useKey(value) {
  memory.key = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // It lives as long as the page, then.
  }
}

/** The models there are. */
export async function models() {
  return (await json("v1/models")).data ?? [];
}

/** The server's figures, as serving/http/stats.py describes them. */
export function stats() {
  return json("v1/stats");
}

/** The state of the server, also where it serves nothing yet. */
export async function health() {
  const response = await sent("health", {});
  const body = await response.json().catch(() => ({}));
  return { state: body.state ?? (response.ok ? "serving" : "unavailable") };
}

/**
 * Chunks of a streamed chat completion, in order.
 * @param {object} body
 * @param {AbortSignal} signal ends the request on the server too
 */
export async function* chat(body, signal) {
  const response = await sent("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw await fault(response);
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parsed(data);
      if (chunk.error) throw new ApiError(200, chunk.error.message || "The server ended the answer by an error.");
      yield chunk;
    }
  } catch (error) {
    throw ours(error) ? error : new ApiError(0, "The connection broke off before the answer was complete.");
  }
  throw new ApiError(0, "The answer broke off before its end.");
}

async function json(path) {
  const response = await sent(path, { headers: { Accept: "application/json" } });
  if (!response.ok) throw await fault(response);
  return response.json();
}

async function sent(path, options) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  try {
    return await fetch(new URL(path, document.baseURI), { cache: "no-store", ...options, headers });
  } catch (error) {
    throw ours(error) ? error : new ApiError(0, "The server cannot be reached. Is it running?");
  }
}

function ours(error) {
  return error instanceof ApiError || error.name === "AbortError";
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError(200, "The server sent something that is no JSON in the middle of its answer.");
  }
}

/** The error that a response stands for. */
async function fault(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.error?.message || "";
  const after = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  const retryAfterS = Number.isFinite(after) && after >= 0 ? after : null;
  return new ApiError(response.status, worded(response.status, said, retryAfterS), retryAfterS);
}

function worded(status, said, retryAfterS) {
  const when = retryAfterS === null ? "a little later" : `in ${seconds(Math.max(retryAfterS, 1))}`;
  const openings = {
    401: "The server does not know this key.",
    403: "This key may not do that.",
    404: "There is no such thing on this server.",
    408: "It took longer than was allowed.",
    413: "The conversation is too large to send.",
    429: `The server is busy, or this key has used its share. Try again ${when}.`,
    503: `The server is not ready. Try again ${when}.`,
  };
  const opening = openings[status] ?? (status >= 500 ? "The server made a mistake." : "The server refused this.");
  return said ? `${opening} It says: ${said}` : opening;
}
