// Runs before the page is drawn, so that a chosen theme never flashes. Without a choice the system's applies.
"use strict";
(() => {
  const KEY = "spark-theme";
  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage can be forbidden; then a choice lasts as long as the page
    }
  };
  const chosen = stored();
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;

  const isDark = () => {
    const theme = document.documentElement.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.querySelector("[data-theme-switch]");
    if (!button) return;
    const label = () => {
      button.textContent = isDark() ? "Light theme" : "Dark theme";
    };
    button.hidden = false;
    label();
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      document.documentElement.dataset.theme = theme;
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // see above
      }
      label();
      document.dispatchEvent(new CustomEvent("spark:theme"));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      label();
      document.dispatchEvent(new CustomEvent("spark:theme"));
    });
  });
})();
