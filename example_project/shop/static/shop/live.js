// Shows the page's new state by itself: now and then, and at once when a countdown has ended.
// What may change is inside the element with data-live; its data-version says whether it did.
"use strict";

const HURRY_MS = 400; // how often to look just after a deadline
const CALM_MS = 4000; // how often to look otherwise: someone else may have paid
let live = document.querySelector("[data-live]");
let looking = false;
let hurry = false;
let timer;

function localTimes() {
  const style = { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" };
  for (const node of document.querySelectorAll("[data-moment]")) {
    node.textContent = new Date(node.getAttribute("datetime")).toLocaleString(undefined, style);
  }
}

async function look() {
  if (looking || document.hidden) return;
  looking = true;
  try {
    const answer = await fetch(location.href);
    if (answer.ok) show(new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-live]"));
  } catch (error) {
    console.warn("The shop cannot be reached; trying again soon.", error);
  } finally {
    looking = false;
  }
}

function show(fresh) {
  if (!fresh || fresh.dataset.version === live.dataset.version) return;
  const before = live.dataset.status;
  const focused = live.contains(document.activeElement) ? document.activeElement.id : null;
  hurry = false;
  live.replaceWith(fresh);
  live = fresh;
  localTimes();
  if (focused !== null) (document.getElementById(focused) || live).focus({ preventScroll: true });
  if (live.dataset.status !== before) document.getElementById("announcer").textContent = "Now: " + live.dataset.status;
}

function lookAgain() {
  clearTimeout(timer);
  timer = setTimeout(() => look().finally(lookAgain), hurry ? HURRY_MS : CALM_MS);
}

localTimes();
if (live) {
  document.addEventListener("delayq:due", () => { hurry = true; look().finally(lookAgain); });
  document.addEventListener("delayq:settled", look);
  document.addEventListener("visibilitychange", look);
  document.addEventListener("submit", () => { looking = true; }); // it would take the message for the next page
  lookAgain();
}
