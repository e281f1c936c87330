// SPDX-License-Identifier: Apache-2.0
// The promise of this runtime, put to the test: the same request with the same seed gives the same answer.

import { counted, shownToken } from "./words.js";

/** @typedef {import("./tree.js").Message} Message */

/**
 * How far two answers agree. `same` where the second says all that the first said; one that was stopped early is held
 * to as far as it went.
 * @param {Message} first
 * @param {Message} second
 * @param {boolean} cutShort whether the second was ended as soon as it was as long as the first
 * @returns {{same: boolean, about: string}}
 */
export function compared(first, second, cutShort) {
  const units = first.entries?.length && second.entries?.length ? byTokens(first, second) : byCharacters(first, second);
  const { agreed, one, other, thing } = units;
  if (agreed < Math.min(one.length, other.length)) return differs(agreed, one[agreed], other[agreed], thing);
  const partial = first.state === "stopped" || cutShort;
  if (one.length === other.length || (partial && other.length >= one.length)) {
    if (!partial && first.state !== second.state) {
      return { same: false, about: `The same text, but it ended by “${second.state}”, not by “${first.state}”.` };
    }
    const far = partial ? ", as far as it went" : "";
    return { same: true, about: `The same answer${far}: ${agreed === 1 ? `its one ${thing}` : `all ${counted(agreed, thing)}`}.` };
  }
  const than = one.length > other.length ? "shorter" : "longer";
  return { same: false, about: `Different: the second is ${than}, ${counted(other.length, thing)}, not ${one.length}.` };
}

function differs(agreed, one, other, thing) {
  const about = `Different from ${thing} ${agreed + 1} on: “${shownToken(...one)}” then, “${shownToken(...other)}” now.`;
  return { same: false, about };
}

function byTokens(first, second) {
  const [one, other] = [first, second].map((message) => message.entries.map(({ token, bytes }) => [token, bytes]));
  const equal = (a, b) => a[0] === b[0] && String(a[1]) === String(b[1]);
  return { ...agreement(one, other, equal), thing: "token" };
}

function byCharacters(first, second) {
  const [one, other] = [first, second].map((message) => [...said(message)].map((letter) => [letter, null]));
  return { ...agreement(one, other, (a, b) => a[0] === b[0]), thing: "character" };
}

function agreement(one, other, equal) {
  let agreed = 0;
  while (agreed < Math.min(one.length, other.length) && equal(one[agreed], other[agreed])) agreed += 1;
  return { agreed, one, other };
}

/** All that an answer says. */
function said(message) {
  const calls = (message.calls ?? []).map((call) => `${call.name}(${call.arguments})`);
  return [message.reasoning ?? "", message.content, ...calls].join("");
}
