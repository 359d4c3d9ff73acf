// Keeps "in 12 min" and "3 s late" right, by the server's clock: a visitor's own may be wrong, and may be set while
// the page is open. An element brings along the moment it counts to, the server's moment, and the words to use.
"use strict";

{
  const TICK_MS = 1000;
  const [visit] = performance.getEntriesByType("navigation");
  const answeredAt = visit ? visit.responseStart : performance.now();

  const words = (node) => {
    const [later, late, now, days, hours, minutes, seconds] = node.dataset.delayqWords.split("|");
    return { later, late, now, units: [[days, 86400], [hours, 3600], [minutes, 60], [seconds, 1]] };
  };

  // A length of time in its two largest units; seconds are left out from ten minutes on.
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

  const inWords = (leftMs, said) => {
    if (leftMs > 0) return said.later.replace("{span}", span(Math.ceil(leftMs / 1000), said));
    const seconds = Math.floor(-leftMs / 1000);
    return seconds ? said.late.replace("{span}", span(seconds, said)) : said.now;
  };

  const draw = () => {
    for (const node of document.querySelectorAll("[data-delayq-due]")) {
      const serverNow = Number(node.dataset.delayqNow) + performance.now() - answeredAt;
      const leftMs = Number(node.dataset.delayqDue) - serverNow;
      const text = inWords(leftMs, words(node));
      if (node.textContent !== text) node.textContent = text;
      node.classList.toggle("delayq-late", leftMs <= 0);
    }
  };

  const start = () => {
    draw();
    setInterval(draw, TICK_MS);
  };

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
