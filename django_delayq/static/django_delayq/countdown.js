// <delayq-countdown>: counts down to a deadline by the server's clock, however wrong the visitor's is.
//
// Attributes, written by the template tag `countdown`:
//   data-due, data-now   the deadline, and the server's clock when the page was made, in ms since 1970
//   data-left, data-done words: "{time} left", "time is up"
//   data-at-zero="reload" load the page again once the deadline has passed
//   data-sync            address of a countdown endpoint, asked instead of trusting the page
//   data-announce        tell screen readers: at the marks below and at the end, never every second
// Events, bubbling: `delayq:due` at the deadline (preventDefault() keeps the page from being loaded again),
// `delayq:settled` once the endpoint says what became of it (its answer is in `detail`).
// Nothing here needs inline scripts or styles, so a strict Content-Security-Policy may stay.
"use strict";
(() => {
  const SECOND = 1000;
  const MARKS = [3600, 600, 300, 60]; // seconds left when a screen reader is told
  const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const CALM = matchMedia("(prefers-reduced-motion: reduce)");
  const PATIENCE = [2, 4, 8, 15, 30]; // seconds between two looks at the endpoint once the deadline has passed
  const REST = 30 * SECOND; // no more than one look in this time while it is still running
  let isFirstPage = true; // elements that come later were made just now, and not with the page
  let region = null;

  class Countdown extends HTMLElement {
    connectedCallback() {
      const [page] = isFirstPage ? performance.getEntriesByType("navigation") : [];
      this.setClock(Number(this.dataset.now), page && page.responseStart ? page.responseStart : performance.now());
      this.due = Number(this.dataset.due);
      this.mark = null;
      this.isOver = false;
      this.looks = 0;
      this.lookedAt = 0;
      this.wasLate = this.leftMs() <= 0;
      if ("announce" in this.dataset) announcer(); // readers listen to what was there before it spoke
      this.onShow = () => { if (!document.hidden && !this.isOver) { this.draw(); this.look(REST); } };
      document.addEventListener("visibilitychange", this.onShow);
      this.draw();
      if (page && page.type === "back_forward") this.look(REST); // such a page may be hours old
    }

    disconnectedCallback() {
      clearTimeout(this.timer);
      document.removeEventListener("visibilitychange", this.onShow);
    }

    // The server's clock showed `nowMs` when ours had run for `atMs` since the page was opened.
    setClock(nowMs, atMs) {
      this.base = { nowMs, atMs, dateMs: Date.now() - (performance.now() - atMs) };
    }

    // Two clocks of ours run on from there. One stands still while the machine sleeps, the other jumps back when
    // somebody sets it; whichever ran further is right.
    leftMs() {
      const { nowMs, atMs, dateMs } = this.base;
      return this.due - nowMs - Math.max(performance.now() - atMs, Date.now() - dateMs);
    }

    draw() {
      clearTimeout(this.timer);
      const left = this.leftMs();
      if (left <= 0) { if (!this.isOver) this.end(); return; }
      this.write(this.inWords(left));
      this.announceAtMarks(Math.ceil(left / SECOND));
      this.timer = setTimeout(() => this.draw(), (left % SECOND) + 5);
    }

    write(text) {
      const place = this.querySelector("time") || this;
      if (place.textContent !== text) place.textContent = text;
    }

    inWords(left) {
      const seconds = Math.ceil(left / SECOND);
      if (CALM.matches) return this.roughly(seconds > 60 ? Math.ceil(seconds / 60) * 60 : Math.ceil(seconds / 10) * 10);
      const days = Math.floor(seconds / 86400);
      const parts = [Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60, seconds % 60];
      const clock = (days || parts[0] ? parts : parts.slice(1)).map((n) => String(n).padStart(2, "0")).join(":");
      return days ? `${this.inUnit(days, "day")} ${clock}` : clock;
    }

    // The two largest units: "1 hour 5 minutes".
    roughly(seconds) {
      const parts = [];
      for (const [unit, length] of UNITS) {
        if (seconds >= length && parts.length < 2) parts.push(this.inUnit(Math.floor(seconds / length), unit));
        seconds %= length;
      }
      return parts.join(" ");
    }

    inUnit(number, unit) {
      const language = this.lang || document.documentElement.lang || undefined;
      return new Intl.NumberFormat(language, { style: "unit", unit, unitDisplay: "long" }).format(number);
    }

    announceAtMarks(seconds) {
      const mark = MARKS.filter((one) => one >= seconds).pop() || Infinity;
      const isNews = this.mark !== null && mark < this.mark;
      this.mark = mark;
      if (isNews) this.announce(this.dataset.left.replace("{time}", this.roughly(mark)));
    }

    announce(words) {
      if (!("announce" in this.dataset)) return;
      const name = this.getAttribute("aria-label");
      announcer().textContent = name ? `${name}: ${words}` : words;
    }

    end() {
      this.isOver = true;
      this.write(this.dataset.done);
      if (!this.wasLate) this.announce(this.dataset.done);
      const event = new CustomEvent("delayq:due", { bubbles: true, cancelable: true });
      this.mayReload = this.dispatchEvent(event) && this.dataset.atZero === "reload";
      if (this.dataset.sync) this.follow();
      // The worker needs a moment, and not all visitors should come at once. Where the page was late to begin
      // with, something holds the worker up: the later it is, the less often the page comes back.
      else if (this.mayReload) {
        const pause = this.wasLate ? Math.max(15 * SECOND, -this.leftMs() / 2) : (1 + Math.random()) * SECOND;
        this.timer = setTimeout(() => location.reload(), Math.min(pause, 2 ** 31 - 1));
      }
    }

    // After the deadline: look at the endpoint until it says what became of it, or that it was moved.
    async follow() {
      await this.look(0);
      if (!this.isConnected || !this.isOver || this.isSettled) return;
      const pause = PATIENCE[Math.min(this.looks, PATIENCE.length - 1)] * (1 + Math.random() / 4);
      this.looks += 1;
      this.timer = setTimeout(() => this.follow(), pause * SECOND);
    }

    async look(restMs) {
      if (!this.dataset.sync || this.isLooking || Date.now() - this.lookedAt < restMs) return;
      this.isLooking = true;
      try {
        const headers = { Accept: "application/json", ...(this.tag ? { "If-None-Match": this.tag } : {}) };
        const askedAt = performance.now();
        const answer = await fetch(this.dataset.sync, { headers, cache: "no-store", credentials: "same-origin" });
        const midway = (askedAt + performance.now()) / 2;
        const now = Number(answer.headers.get("X-Server-Time"));
        if (now && (answer.ok || answer.status === 304)) this.setClock(now, midway);
        if (answer.ok) { this.tag = answer.headers.get("ETag"); this.learn(await answer.json()); }
        if (!this.isSettled && this.leftMs() > 0) { this.isOver = false; this.looks = 0; this.draw(); }
        this.lookedAt = Date.now();
      } catch (error) {
        console.warn("delayq-countdown: the server cannot be reached; trying again.", error);
      } finally {
        this.isLooking = false;
      }
    }

    learn(answer) {
      if (answer.state === "pending") {
        this.due = Date.parse(answer.due_at);
        const time = this.querySelector("time");
        if (time) time.dateTime = answer.due_at;
        return;
      }
      this.isOver = this.isSettled = true;
      clearTimeout(this.timer);
      if (answer.state === "fired") this.write(this.dataset.done);
      else this.hidden = true; // nothing is running down any more
      const event = new CustomEvent("delayq:settled", { bubbles: true, cancelable: true, detail: answer });
      if (this.dispatchEvent(event) && this.mayReload !== false && this.dataset.atZero === "reload") location.reload();
    }
  }

  // One for all, kept outside of what pages may exchange, and hidden from the eye only.
  function announcer() {
    if (!region) {
      region = document.createElement("div");
      region.setAttribute("aria-live", "polite");
      Object.assign(region.style, { position: "absolute", width: "1px", height: "1px", overflow: "hidden", clipPath: "inset(50%)" });
    }
    if (!region.isConnected) document.body.append(region);
    return region;
  }

  if (!customElements.get("delayq-countdown")) customElements.define("delayq-countdown", Countdown);
  isFirstPage = document.readyState !== "complete";
  for (const name of ["DOMContentLoaded", "load"]) addEventListener(name, () => { isFirstPage = false; });
})();
