// SPDX-License-Identifier: Apache-2.0
// Runs before the first paint, so that a chosen theme never flashes the other one. "auto" follows the system.
(() => {
  const KEY = "metrale.theme";

  /** The theme that was chosen here; "auto" where storage is closed to us. */
  function chosen() {
    try {
      return localStorage.getItem(KEY) || "auto";
    } catch {
      return "auto";
    }
  }

  /** Puts a theme on the page. */
  function show(theme) {
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  }

  show(chosen());
  addEventListener("DOMContentLoaded", () => {
    for (const radio of document.querySelectorAll("#theme input")) {
      radio.checked = radio.value === chosen();
      radio.addEventListener("change", () => {
        show(radio.value);
        try {
          localStorage.setItem(KEY, radio.value);
        } catch {
          // A browser that keeps nothing still shows it.
        }
      });
    }
  });
})();
