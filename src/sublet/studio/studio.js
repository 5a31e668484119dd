// Shows the part of the page that changes by itself whenever the studio says how it is now. What is typed into a form stays, since the
// form lies outside of the part that is replaced.
"use strict";
(() => {
  const AGAIN_MS = 2000;
  const TICK_MS = 10000;
  const SLEPT_MS = 300000;  // the timers of a tab in the background run once a minute
  const part = document.getElementById("part");
  const lost = document.getElementById("lost");
  let news;
  const show = (message) => {
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
  const connect = () => {
    const stream = new EventSource(part.dataset.live);
    news = stream;
    stream.onopen = () => { lost.hidden = true; };
    stream.onmessage = show;
    stream.onerror = () => {
      lost.hidden = false;
      if (stream.readyState === EventSource.CLOSED) { setTimeout(refused, AGAIN_MS); }
    };
    stream.addEventListener("over", () => { stream.close(); location.reload(); });
  };
  // A browser asks again by itself for a stream that broke, but not where another answer came. Where the page itself is no longer
  // answered, the sign-in is over, as after a night, and it is loaded to say so; else a proxy answered for a studio that was away.
  const refused = async () => {
    let isOver = false;
    try {
      const answer = await fetch(location.href, { redirect: "manual" });
      isOver = answer.type === "opaqueredirect" || (answer.status >= 400 && answer.status < 500);
    } catch { /* nothing answers */ }
    if (isOver) { location.reload(); } else { connect(); }
  };
  connect();
  // The second press of a double click would be answered that there is a session of this name already.
  let sent_ms = 0;
  document.addEventListener("submit", (event) => {
    if (Date.now() - sent_ms < AGAIN_MS) { event.preventDefault(); } else { sent_ms = Date.now(); }
  });
  // The connection of a machine that slept may lead nowhere, and nothing tells the browser.
  let ticked_ms = Date.now();
  setInterval(() => {
    const now_ms = Date.now();
    if (now_ms - ticked_ms > SLEPT_MS) {
      news.close();
      connect();
    }
    ticked_ms = now_ms;
  }, TICK_MS);
})();
