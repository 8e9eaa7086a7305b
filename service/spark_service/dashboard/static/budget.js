// The slider of the budget page: its size is told while it moves, and where htmx is there the answer follows by itself.
"use strict";
(() => {
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  const size = (bytes) => {
    let value = bytes;
    let unit = 0;
    while (value >= 1023.95 && unit < UNITS.length - 1) {
      value /= 1024;
      unit += 1;
    }
    return unit ? `${value.toFixed(1)} ${UNITS[unit]}` : `${bytes} B`;
  };

  document.addEventListener("DOMContentLoaded", () => {
    const form = document.querySelector("[data-budget-form]");
    if (!form) return;
    const slider = form.elements.vram_bytes;
    const told = form.querySelector("[data-budget-size]");
    const tell = () => {
      told.textContent = size(Number(slider.value));
      slider.setAttribute("aria-valuetext", told.textContent);
    };
    slider.addEventListener("input", tell);
    tell();
    if (typeof htmx === "undefined") return;
    form.querySelector("[data-budget-submit]").hidden = true;
    // The address is always that of what is shown, to be kept or sent to somebody.
    const keepAddress = () => history.replaceState(null, "", `?${new URLSearchParams(new FormData(form))}`);
    form.addEventListener("input", keepAddress);
    // Another model or context has another slider: a whole page.
    for (const choice of form.querySelectorAll("[data-reload]")) choice.addEventListener("change", () => form.submit());
  });
})();
