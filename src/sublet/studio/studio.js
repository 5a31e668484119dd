// Shows the part of the page that changes by itself whenever the studio says how it is now. What is typed into a form stays, since the
// form lies outside of the part that is replaced.
"use strict";
(() => {
  const part = document.getElementById("part");
  const lost = document.getElementById("lost");
  const news = new EventSource(part.dataset.live);
  news.onopen = () => { lost.hidden = true; };
  news.onmessage = (message) => {
    lost.hidden = true;
    const focus = document.activeElement;
    const form = focus instanceof Element && part.contains(focus) ? focus.closest("form") : null;
    const action = form === null ? null : form.getAttribute("action");
    const open = new Set([...part.querySelectorAll("details[open]")].map((one) => one.id));
    part.innerHTML = message.data;
    for (const details of part.querySelectorAll("details")) { details.open = open.has(details.id); }
    if (action !== null) {
      const same = [...part.querySelectorAll("form")].find((one) => one.getAttribute("action") === action);
      if (same !== undefined) { same.querySelector("button").focus(); }
    }
  };
  news.onerror = () => { lost.hidden = false; };
  news.addEventListener("over", () => { news.close(); location.reload(); });
})();
