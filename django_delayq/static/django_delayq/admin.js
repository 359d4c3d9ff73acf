// Updates "in 12 min" and "3 s late" by the server's clock: the visitor's may be wrong, and may change while the page
// is open. Each element has the time that it counts to, the server's time, and the texts to use.
// And sends a form once, if it has the attribute data-delayq-once: a double click would postpone twice.
"use strict";

{
  const TICK_MS = 1000;
  const ONCE_MS = 5000; // a form whose request was stopped can be sent again after that
  const [visit] = performance.getEntriesByType("navigation");
  const answeredAt = visit ? visit.responseStart : performance.now();

  const textsOf = (node) => {
    const [later, late, now, days, hours, minutes, seconds] = node.dataset.delayqWords.split("|");
    return { later, late, now, units: [[days, 86400], [hours, 3600], [minutes, 60], [seconds, 1]] };
  };

  // A duration in its two largest units, without seconds from ten minutes on.
  const span = (total, { units, now }) => {
    let rest = total;
    const counts = (total < 600 ? units : units.slice(0, 3)).map(([form, length]) => {
      const count = Math.floor(rest / length);
      rest -= count * length;
      return [form, count];
    });
    const found = counts.findIndex(([, count]) => count > 0);
    const shown = found < 0 ? counts.slice(-1) : counts.slice(found, found + 2);
    const parts = shown.filter(([, count]) => count > 0 || shown.length === 1);
    return parts.map(([form, count]) => form.replace("{n}", count)).join(" ") || now;
  };

  const textOf = (leftMs, texts) => {
    if (leftMs > 0) return texts.later.replace("{span}", span(Math.ceil(leftMs / 1000), texts));
    const seconds = Math.floor(-leftMs / 1000);
    return seconds ? texts.late.replace("{span}", span(seconds, texts)) : texts.now;
  };

  const draw = () => {
    for (const node of document.querySelectorAll("[data-delayq-due]")) {
      const serverNow = Number(node.dataset.delayqNow) + performance.now() - answeredAt;
      const leftMs = Number(node.dataset.delayqDue) - serverNow;
      const text = textOf(leftMs, textsOf(node));
      if (node.textContent !== text) node.textContent = text;
      node.classList.toggle("delayq-late", leftMs <= 0);
    }
  };

  const sentAt = new WeakMap();
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-delayq-once]")) return;
    if (performance.now() - sentAt.get(event.target) < ONCE_MS) event.preventDefault();
    else sentAt.set(event.target, performance.now());
  });

  const start = () => {
    draw();
    setInterval(draw, TICK_MS);
  };

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
