// SPDX-License-Identifier: Apache-2.0
// The two side columns: part of the page where there is room, and drawers over it where there is not.

import { byId } from "./dom.js";

const ROOM = { chats: "(min-width: 62rem)", panel: "(min-width: 80rem)" };
const ROLES = { chats: "navigation", panel: "complementary" };
const BEHIND = ["bar", "main", "chats", "panel"];

/** Lets the columns be opened and closed. Gives a function that shows one of them, if it is hidden. */
export function openDrawers() {
  for (const id of Object.keys(ROOM)) {
    byId(`open-${id}`).addEventListener("click", () => open(id));
    matchMedia(ROOM[id]).addEventListener("change", () => close(id, false));
  }
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => close(button.dataset.close));
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.defaultPrevented) for (const id of Object.keys(ROOM)) close(id);
  });
  addEventListener("pointerdown", (event) => {
    for (const id of Object.keys(ROOM)) if (isOpen(id) && !byId(id).contains(event.target)) close(id);
  });
  return { reveal: open, close };
}

function open(id) {
  if (matchMedia(ROOM[id]).matches || isOpen(id)) return;
  const drawer = byId(id);
  drawer.classList.add("open");
  drawer.setAttribute("role", "dialog");
  drawer.setAttribute("aria-modal", "true");
  byId(`open-${id}`).setAttribute("aria-expanded", "true");
  for (const other of BEHIND) byId(other).inert = other !== id;
  document.body.classList.add("drawn");
  drawer.querySelector("[data-close]").focus();
}

function close(id, giveBack = true) {
  if (!isOpen(id)) return;
  const drawer = byId(id);
  drawer.classList.remove("open");
  drawer.setAttribute("role", ROLES[id]);
  drawer.removeAttribute("aria-modal");
  byId(`open-${id}`).setAttribute("aria-expanded", "false");
  for (const other of BEHIND) byId(other).inert = false;
  document.body.classList.remove("drawn");
  if (giveBack) byId(`open-${id}`).focus();
}

function isOpen(id) {
  return byId(id).classList.contains("open");
}
