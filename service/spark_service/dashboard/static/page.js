// Small things that make pages pleasant; every page works without them.
"use strict";
(() => {
  // <button data-copy="ID" hidden>: copies the text of an element.
  const prepareCopying = (root) => {
    if (!navigator.clipboard) return; // only where the page came over TLS or from this machine
    for (const button of root.querySelectorAll("button[data-copy]")) {
      button.hidden = false;
    }
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button[data-copy]");
    if (!button) return;
    const source = document.getElementById(button.dataset.copy);
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(source.textContent.trim());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy it by hand";
    }
    setTimeout(() => {
      button.textContent = label;
    }, 2000);
  });

  // <form data-submit-on-change>: filters apply at once, and their button is not needed.
  document.addEventListener("change", (event) => {
    event.target.form?.closest("form[data-submit-on-change]")?.requestSubmit();
  });

  const prepare = (root) => {
    prepareCopying(root);
    document.dispatchEvent(new CustomEvent("spark:content", { detail: root }));
  };
  document.addEventListener("DOMContentLoaded", () => prepare(document));
  document.addEventListener("htmx:after:swap", () => prepare(document));
})();
