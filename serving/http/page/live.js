// SPDX-License-Identifier: Apache-2.0
// The server's figures, asked for once a second while somebody looks.

import { ApiError, health, stats } from "./api.js";
import { byId, el, fill, say } from "./dom.js";
import { Sparkline } from "./sparkline.js";
import { bytes, count, percent, rate } from "./words.js";

const EVERY_MS = 1000;
// A server that does not answer is asked less and less often.
const MOST_MS = 10_000;
const SAMPLES = 60;

const share = (part, whole) => (whole ? part / whole : 0);
const busy = (now) => now.requests.running + now.requests.prefilling;
const used = (now) => share(now.kv_blocks.used, now.kv_blocks.total);
const kept = (now) => share(now.kv_blocks.cached, now.kv_blocks.total);

/**
 * @typedef {object} Figure
 * @property {string} name
 * @property {(now: object) => number|null|undefined} value out of /v1/stats
 * @property {(value: number, now: object) => string} told
 * @property {(now: object) => number|null|undefined} [line] what the line shows, where that is something more recent
 * @property {number} top the least that the height of the line stands for
 * @property {boolean} [some] only some models have it
 */

/** @type {Figure[]} */
const FIGURES = [
  { name: "Generating", value: (now) => now.generated_tokens_per_s, told: (value) => `${rate(value)} tokens/s`, top: 10 },
  { name: "Reading prompts", value: (now) => now.prompt_tokens_per_s, told: (value) => `${rate(value)} tokens/s`, top: 10 },
  { name: "Running", value: busy, told: (value, now) => `${count(value)} of ${count(now.requests.max)}`, top: 4 },
  { name: "Waiting", value: (now) => now.requests.waiting, told: count, top: 4 },
  { name: "KV memory in use", value: used, told: (value, now) => `${percent(value)} of ${count(now.kv_blocks.total)} blocks`, top: 1 },
  { name: "KV memory kept for later", value: kept, told: (value, now) => `${percent(value)}, ${count(now.kv_blocks.cached)} blocks`, top: 1 },
  { name: "State snapshots", value: (now) => now.snapshots && share(now.snapshots.used, now.snapshots.total), told: (_, now) => `${count(now.snapshots.used)} of ${count(now.snapshots.total)}`, top: 1, some: true },
  { name: "Prompt tokens found in cache", value: (now) => now.prefix_hit_rate, line: (now) => now.recent_prefix_hit_rate, told: percent, top: 1 },
  { name: "Drafts accepted", value: (now) => now.drafts?.acceptance, line: (now) => now.drafts?.recent_acceptance, told: percent, top: 1, some: true },
];

/** Shows the figures. `onState(state, stats)` hears of each answer; `onKey` of a server that wants one. */
export class Live {
  constructor(onState, onKey) {
    this.onState = onState;
    this.onKey = onKey;
    this.rows = new Map();
    this.delay = EVERY_MS;
    this.places = el("div", { class: "places", hidden: true });
    document.addEventListener("visibilitychange", () => !document.hidden && this.soon(0));
  }

  /** Begins to ask, or asks now. */
  soon(delay) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), delay);
  }

  async ask() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      const now = await stats();
      this.delay = EVERY_MS;
      this.show(now);
      this.onState(now.state, now);
    } catch (error) {
      this.delay = Math.min(this.delay * 1.5, MOST_MS);
      await this.failed(error);
    }
    this.soon(this.delay);
  }

  async failed(error) {
    if (!(error instanceof ApiError)) console.error(error);
    byId("no-figures").hidden = error.status === 401;
    byId("figures").hidden = true;
    if (error.status === 401) {
      this.onKey();
      this.onState("locked", null);
      return;
    }
    try {
      this.onState((await health()).state, null);
    } catch {
      this.onState("unreachable", null);
    }
  }

  show(now) {
    byId("no-figures").hidden = true;
    byId("figures").hidden = false;
    for (const figure of FIGURES) {
      const value = (now.requests ? figure.value(now) : null) ?? null;
      // What this model has none of takes no room.
      if (figure.some && value === null && !this.rows.has(figure.name)) continue;
      const row = this.rows.get(figure.name) ?? this.row(figure);
      say(row.value, value === null ? "–" : figure.told(value, now));
      row.spark.add((figure.line && now.requests ? figure.line(now) : value) ?? null);
    }
    this.showPlaces(now.drafts?.positions ?? []);
  }

  row({ name, top }) {
    const row = { value: el("span", { class: "value" }), spark: new Sparkline(SAMPLES, top) };
    const node = el("div", {}, el("dt", {}, name), el("dd", {}, row.value, row.spark.node));
    if (name === "Drafts accepted") node.lastChild.append(this.places);
    this.rows.set(name, row);
    byId("figures").append(node);
    return row;
  }

  /** Acceptance by the place in a draft, as little bars. */
  showPlaces(positions) {
    this.places.hidden = !positions.length;
    if (this.places.children.length !== positions.length) {
      this.places.replaceChildren(...positions.map(() => el("span", {}, el("span"))));
      this.places.setAttribute("role", "img");
    }
    positions.forEach((one, at) => {
      this.places.children[at].firstChild.style.blockSize = `${(one ?? 0) * 100}%`;
    });
    const words = positions.map((one, at) => `${at + 1}: ${one === null ? "none yet" : percent(one)}`);
    this.places.setAttribute("aria-label", `Accepted by place in a draft. ${words.join(", ")}`);
  }
}

const STATES = {
  loading: "loading the model",
  warming: "warming up",
  serving: "serving",
  draining: "shutting down",
  failed: "failed",
  stopped: "stopped",
  locked: "asks for a key",
  unreachable: "cannot be reached",
  unavailable: "takes no calls",
};

/** Shows the server's state; while it loads, how far it is. */
export function showState(state, now) {
  document.body.dataset.state = state;
  say(byId("state-text"), STATES[state] ?? state);
  const box = byId("loading");
  const readying = state === "loading" || state === "warming";
  const ill = state === "failed" || state === "draining" || state === "stopped";
  box.hidden = !readying && !ill;
  const meter = byId("loading-meter");
  meter.hidden = !readying || !now?.loading?.total;
  if (readying) say(byId("loading-text"), `The server is ${STATES[state]}. You can write meanwhile.${progress(now?.loading, meter)}`);
  if (ill) say(byId("loading-text"), `The server is ${STATES[state] === "failed" ? "out of order" : STATES[state]}. ${now?.reason ?? ""}`);
}

function progress(loading, meter) {
  if (!loading?.total) return "";
  const { stage, done, total } = loading;
  const sized = stage === "load" || stage === "download";
  const far = sized ? `${bytes(done)} of ${bytes(total)}` : `${count(done)} of ${count(total)}`;
  fill(meter, done / total, far);
  return ` ${stage[0].toUpperCase()}${stage.slice(1)}: ${far}.`;
}
