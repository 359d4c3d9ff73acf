// Refreshes the first page without losing what the visitor has opened, ticked or focused: fetches the page again, and
// changes only what differs. A hidden page does not refresh, and a page that cannot be fetched is tried again.
"use strict";

{
  const [visit] = performance.getEntriesByType("navigation");
  const answeredAt = visit ? visit.responseStart : performance.now();
  const KEPT = { DETAILS: ["open"], INPUT: ["checked", "value"] }; // what the visitor has changed

  const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && a.id === b.id;

  const takeAttributes = (node, model) => {
    const kept = KEPT[node.nodeName] || [];
    for (const { name } of [...node.attributes]) {
      if (!kept.includes(name) && !model.hasAttribute(name)) node.removeAttribute(name);
    }
    for (const { name, value } of model.attributes) {
      if (!kept.includes(name) && node.getAttribute(name) !== value) node.setAttribute(name, value);
    }
  };

  // Makes `node` like `model`. Children with an id are found by it, since the most urgent policies move to the top.
  const become = (node, model) => {
    if (node.nodeType !== Node.ELEMENT_NODE) {
      if (node.nodeValue !== model.nodeValue) node.nodeValue = model.nodeValue;
      return;
    }
    takeAttributes(node, model);
    const byId = new Map([...node.children].filter((each) => each.id).map((each) => [each.id, each]));
    let next = node.firstChild;
    for (const wanted of [...model.childNodes]) {
      let found = wanted.id ? byId.get(wanted.id) : next;
      if (!found || !alike(found, wanted)) {
        found = document.importNode(wanted, true);
        node.insertBefore(found, next);
        continue;
      }
      if (found === next) next = next.nextSibling;
      else node.insertBefore(found, next);
      become(found, wanted);
    }
    while (next) {
      const rest = next.nextSibling;
      next.remove();
      next = rest;
    }
  };

  const refresh = async (page) => {
    const answer = await fetch(location.href, { headers: { "X-Requested-With": "XMLHttpRequest" } });
    const text = await answer.text();
    const model = new DOMParser().parseFromString(text, "text/html").querySelector("[data-delayq-refresh]");
    if (!answer.ok || !model) return;
    const age = performance.now() - answeredAt;
    for (const node of model.querySelectorAll("[data-delayq-now]")) node.dataset.delayqNow -= age; // see admin.js
    const focused = document.activeElement;
    become(page, model);
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  };

  const page = document.querySelector("[data-delayq-refresh]");
  const again = () => setTimeout(run, Number(page.dataset.delayqRefresh) * 1000);
  const run = () => (document.hidden ? Promise.resolve() : refresh(page).catch(() => {})).then(again);
  if (page) again();
}
