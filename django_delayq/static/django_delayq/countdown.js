// <delayq-countdown>: counts down to a deadline by the server's clock, since the visitor's may be wrong.
//
// Attributes, written by the template tag `countdown`:
//   data-due, data-now   the deadline, and the server's time when the page was rendered, in ms since 1970
//   data-left, data-done texts: "{time} left", "time is up"
//   data-rest            how many ms are left while the clock of the timeout is stopped
//   data-stopped         text: "stopped, {time} left"
//   data-at-zero="reload" reload the page after the deadline
//   data-sync            address of a countdown endpoint, which is asked for changes
//   data-announce        announce the time left to screen readers, at the marks below and at the end
// Events, bubbling: `delayq:due` at the deadline (preventDefault() prevents the reload),
// `delayq:settled` once the endpoint reports another state than pending, held or firing (its response is in `detail`).
// It needs no inline scripts or styles, and so works with a strict Content-Security-Policy.
"use strict";
(() => {
  const SECOND = 1000;
  const MARKS = [3600, 600, 300, 60]; // seconds left when a screen reader announces them
  const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const CALM = matchMedia("(prefers-reduced-motion: reduce)");
  const RETRY_SECONDS = [2, 4, 8, 15, 30]; // between two requests to the endpoint after the deadline
  const MIN_INTERVAL = 30 * SECOND; // between two requests before the deadline
  let isFirstPage = true; // elements that are added later have a newer server time
  let region = null;

  class Countdown extends HTMLElement {
    connectedCallback() {
      const [page] = isFirstPage ? performance.getEntriesByType("navigation") : [];
      this.setClock(Number(this.dataset.now), page && page.responseStart ? page.responseStart : performance.now());
      this.due = Number(this.dataset.due);
      this.rest = "rest" in this.dataset ? Number(this.dataset.rest) : null;
      this.mark = null;
      this.isOver = false;
      this.checks = 0;
      this.checkedAt = 0;
      this.wasLate = this.rest === null && this.leftMs() <= 0;
      if ("announce" in this.dataset) announcer(); // readers only announce regions that existed before
      this.onShow = () => { if (!document.hidden && !this.isOver) { this.draw(); this.check(MIN_INTERVAL); } };
      document.addEventListener("visibilitychange", this.onShow);
      this.draw();
      if (page && page.type === "back_forward") this.check(MIN_INTERVAL); // such a page may be hours old
    }

    disconnectedCallback() {
      clearTimeout(this.timer);
      document.removeEventListener("visibilitychange", this.onShow);
    }

    // The server's clock was at `nowMs` when ours was `atMs` after the start of the page.
    setClock(nowMs, atMs) {
      this.base = { nowMs, atMs, dateMs: Date.now() - (performance.now() - atMs) };
    }

    // The visitor has two clocks. One stops while the machine sleeps, the other may be set back. The one that has
    // advanced further is right.
    leftMs() {
      const { nowMs, atMs, dateMs } = this.base;
      return this.due - nowMs - Math.max(performance.now() - atMs, Date.now() - dateMs);
    }

    draw() {
      clearTimeout(this.timer);
      if (this.rest !== null) { // its clock is stopped
        const time = this.roughly(Math.ceil(this.rest / SECOND)) || this.inUnit(0, "second");
        this.write(this.dataset.stopped.replace("{time}", time));
        return;
      }
      const left = this.leftMs();
      if (left <= 0) { if (!this.isOver) this.end(); return; }
      this.write(this.textOf(left));
      this.announceAtMarks(Math.ceil(left / SECOND));
      this.timer = setTimeout(() => this.draw(), (left % SECOND) + 5);
    }

    write(text) {
      const place = this.querySelector("time, span") || this;
      if (place.textContent !== text) place.textContent = text;
    }

    textOf(left) {
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
      // The worker needs some time, and not all visitors should reload at once. If the page was late from the start,
      // the worker is delayed: the later it is, the less often the page is reloaded.
      else if (this.mayReload) {
        const pause = this.wasLate ? Math.max(15 * SECOND, -this.leftMs() / 2) : (1 + Math.random()) * SECOND;
        this.timer = setTimeout(() => location.reload(), Math.min(pause, 2 ** 31 - 1));
      }
    }

    // After the deadline: ask the endpoint until it reports the outcome or a new deadline.
    async follow() {
      await this.check(0);
      if (!this.isConnected || !this.isOver || this.isSettled) return;
      const pause = RETRY_SECONDS[Math.min(this.checks, RETRY_SECONDS.length - 1)] * (1 + Math.random() / 4);
      this.checks += 1;
      this.timer = setTimeout(() => this.follow(), pause * SECOND);
    }

    async check(minIntervalMs) {
      if (!this.dataset.sync || this.isChecking || Date.now() - this.checkedAt < minIntervalMs) return;
      this.isChecking = true;
      try {
        const headers = { Accept: "application/json", ...(this.tag ? { "If-None-Match": this.tag } : {}) };
        const askedAt = performance.now();
        const answer = await fetch(this.dataset.sync, { headers, cache: "no-store", credentials: "same-origin" });
        const midway = (askedAt + performance.now()) / 2;
        const now = Number(answer.headers.get("X-Server-Time"));
        if (now && (answer.ok || answer.status === 304)) this.setClock(now, midway);
        if (answer.ok) { this.tag = answer.headers.get("ETag"); this.update(await answer.json()); }
        if (!this.isSettled && this.leftMs() > 0) { this.isOver = false; this.checks = 0; this.draw(); }
        this.checkedAt = Date.now();
      } catch (error) {
        console.warn("delayq-countdown: the server cannot be reached; retrying.", error);
      } finally {
        this.isChecking = false;
      }
    }

    update(answer) {
      const isPaused = answer.is_paused ?? answer.isPaused; // its deadline stays, and its time runs out
      if (answer.state === "held" && !isPaused) {
        this.rest = SECOND * (answer.seconds_left ?? answer.secondsLeft);
        this.isOver = false;
        this.draw();
        return;
      }
      this.rest = null;
      // The outcome of a running handler is not known.
      if (answer.state === "pending" || answer.state === "firing" || isPaused) {
        const due = answer.due_at ?? answer.dueAt; // some projects render all names in camel case
        this.due = Date.parse(due);
        const time = this.querySelector("time");
        if (time) time.dateTime = due;
        return;
      }
      this.isOver = this.isSettled = true;
      clearTimeout(this.timer);
      if (answer.state === "fired") this.write(this.dataset.done);
      else this.hidden = true; // nothing is left to count down to
      const event = new CustomEvent("delayq:settled", { bubbles: true, cancelable: true, detail: answer });
      if (this.dispatchEvent(event) && this.mayReload !== false && this.dataset.atZero === "reload") location.reload();
    }
  }

  // One region for all elements, outside of parts that pages may replace. It is hidden visually only.
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
