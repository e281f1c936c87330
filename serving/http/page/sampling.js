// SPDX-License-Identifier: Apache-2.0
// The sampling form: kept as it is left, and read for each request.

import { byId, say } from "./dom.js";
import { setSettings, settings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"];
const NUM_TOP = 5;
const MAX_SEED = 2 ** 31;

/** Restores the form and keeps what is changed. */
export function openSampling() {
  const form = form_();
  for (const [name, value] of Object.entries(settings())) {
    const field = form.elements[name];
    if (!field) continue;
    if (field.type === "checkbox") field.checked = value === true;
    else field.value = String(value);
  }
  const keep = () => {
    const entries = [...form.elements].filter((one) => one.name);
    setSettings(Object.fromEntries(entries.map((one) => [one.name, one.type === "checkbox" ? one.checked : one.value])));
    show(form);
  };
  form.addEventListener("input", keep);
  form.addEventListener("change", keep);
  form.addEventListener("reset", () => setTimeout(keep));
  form.addEventListener("submit", (event) => event.preventDefault());
  show(form);
}

/**
 * What a request says beside its messages, with a seed always; and the system prompt. null where the form is at fault:
 * it says so, and the field has the focus.
 * @returns {{asked: object, system: string}|null}
 */
export function asked() {
  const form = form_();
  if (!show(form, true)) return null;
  const found = {};
  for (const name of NUMBERS) {
    if (form.elements[name].value !== "") found[name] = form.elements[name].valueAsNumber;
  }
  found.seed = form.elements.seed.value === "" ? freshSeed() : form.elements.seed.valueAsNumber;
  const format = form.elements.format.value;
  if (format === "json_object") found.response_format = { type: format };
  if (format === "json_schema") {
    found.response_format = { type: format, json_schema: { name: "answer", schema: JSON.parse(form.elements.schema.value) } };
  }
  if (form.elements.probabilities.checked) Object.assign(found, { logprobs: true, top_logprobs: NUM_TOP });
  return { asked: found, system: form.elements.system.value.trim() };
}

/** A seed that was not asked for: it is drawn here, so that the answer can be had again. */
export function freshSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] % MAX_SEED;
}

/** Whether the form is right; marks what is not. */
function show(form, focus = false) {
  const { schema, format, tint } = form.elements;
  byId("schema-label").hidden = format.value !== "json_schema";
  document.body.classList.toggle("tinted", tint.checked);
  schema.setCustomValidity(format.value === "json_schema" ? schemaFault(schema.value) : "");
  let first = null;
  for (const field of form.elements) {
    if (!field.name) continue;
    const right = field.validity.valid;
    if (right) field.removeAttribute("aria-invalid");
    else field.setAttribute("aria-invalid", "true");
    if (!right) first ??= field;
  }
  say(byId("sampling-fault"), first ? faultOf(first) : "");
  if (first && focus) first.dispatchEvent(new CustomEvent("wanted", { bubbles: true }));
  return !first;
}

function faultOf(field) {
  const name = field.closest("label").firstChild.textContent.trim();
  const { validity, min, max, step } = field;
  if (validity.customError) return `${name}: ${field.validationMessage}`;
  if (validity.badInput) return `${name} is no number.`;
  if (validity.rangeUnderflow || validity.rangeOverflow) {
    return max ? `${name} goes from ${min} to ${max}.` : `${name} begins at ${min}.`;
  }
  return step === "1" ? `${name} is a whole number.` : `${name} goes in steps of ${step}.`;
}

function schemaFault(text) {
  try {
    const schema = JSON.parse(text);
    return schema && typeof schema === "object" && !Array.isArray(schema) ? "" : "give a JSON object.";
  } catch {
    return "this is no JSON.";
  }
}

function form_() {
  return /** @type {HTMLFormElement} */ (byId("sampling"));
}
