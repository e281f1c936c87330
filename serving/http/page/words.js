// SPDX-License-Identifier: Apache-2.0
// Numbers and characters as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A count: 12,345. */
export function count(number) {
  return WHOLE.format(number);
}

/** A count of things: "1 token", "2 tokens". */
export function counted(number, thing) {
  return `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
}

/** A rate with as many digits as it deserves: 0, 3.4, 128, 1,204. */
export function rate(number) {
  return number === 0 ? "0" : number < 10 ? number.toFixed(1) : count(number);
}

/** A share as percent: 0 %, 0.02 %, 4.1 %, 73 %. */
export function percent(share) {
  const value = share * 100;
  if (value === 0 || value >= 99.95) return `${Math.round(value)} %`;
  if (value < 0.01) return "< 0.01 %";
  return `${value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : value.toFixed(value > 99 ? 1 : 0)} %`;
}

/** A time: 0.21 s, 12 s, 3 min. */
export function seconds(value) {
  if (value < 10) return `${Number(value.toFixed(value < 1 ? 2 : 1))} s`;
  return value < 120 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

/** Bytes: 12 kB, 269 MB, 1.4 GB. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${value < 10 && step ? value.toFixed(1) : Math.round(value)} ${units[step]}`;
}

const NAMED = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "↵" };
// Controls, what has no width, and what turns the direction of text.
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u;

/** A token's text with what cannot be seen made visible; half a character as its bytes. */
export function shownToken(text, raw) {
  if (text.includes("\ufffd") && raw?.length) {
    return raw.map((byte) => `<${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
  }
  const marks = [...text].map((one) => {
    if (NAMED[one]) return NAMED[one];
    return INVISIBLE.test(one) ? `U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}` : one;
  });
  return marks.join("") || "(nothing)";
}
