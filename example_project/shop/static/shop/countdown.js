// Counts down by the server's clock, and shows the page's new state by itself once its deadline has passed.
// What may change is inside the element with data-live; its data-version says whether it did.
"use strict";

const FRAME_MS = 250;
const HURRY_MS = 400; // how often to look just after a deadline
const CALM_MS = 4000; // how often to look otherwise: someone else may have paid
let live = document.querySelector("[data-live]");
let offset = live ? Number(live.dataset.nowMs) - Date.now() : 0; // the server's clock minus ours
let looking = false;

const serverNow = () => Date.now() + offset;
const leftMs = (node) => Number(node.dataset.dueMs) - serverNow();
const countdowns = () => [...document.querySelectorAll("[data-due-ms]")];

function inWords(ms) {
  const seconds = Math.max(0, Math.ceil(ms / 1000));
  const parts = [Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60, seconds % 60];
  const days = Math.floor(seconds / 86400);
  const clock = (days || parts[0] ? parts : parts.slice(1)).map((n) => String(n).padStart(2, "0")).join(":");
  return (days ? days + (days === 1 ? " day " : " days ") : "") + clock;
}

function draw() {
  for (const node of countdowns()) {
    const text = leftMs(node) > 0 ? inWords(leftMs(node)) : "time is up";
    if (node.textContent !== text) node.textContent = text;
  }
}

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
  offset = Number(fresh.dataset.nowMs) - Date.now();
  live.replaceWith(fresh);
  live = fresh;
  localTimes();
  draw();
  if (live.dataset.status !== before) document.getElementById("announcer").textContent = "Now: " + live.dataset.status;
}

function lookForever() {
  const hurry = countdowns().some((node) => leftMs(node) <= FRAME_MS);
  setTimeout(() => look().finally(lookForever), hurry ? HURRY_MS : CALM_MS);
}

function lookAtTheDeadline() {
  if (countdowns().some((node) => leftMs(node) <= 0 && leftMs(node) > -2 * FRAME_MS)) look();
}

localTimes();
draw();
if (live) {
  setInterval(() => { draw(); lookAtTheDeadline(); }, FRAME_MS);
  document.addEventListener("visibilitychange", look);
  lookForever();
}
