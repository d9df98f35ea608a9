// Brings the page's figures up to date in place. Without this script, a reload does the same.
"use strict";

(() => {
  const seconds = Number(document.body.dataset.refresh);
  if (!(seconds > 0) || !document.getElementById("live")) return;
  let asked = 0;

  const note = (text) => {
    let line = document.getElementById("unreachable");
    if (!line) {
      line = document.createElement("p");
      line.id = "unreachable";
      line.setAttribute("role", "status");
      document.getElementById("main").prepend(line);
    }
    line.textContent = text;
    line.className = text ? "problem" : "";
  };

  const replace = (text) => {
    const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("live");
    if (!fresh) throw new Error("not this page");
    const live = document.getElementById("live");
    // The focus and the scrolled tables stay where they are, unless what had it is gone.
    const focused = live.contains(document.activeElement) ? place(live, document.activeElement) : null;
    const scrolled = [...live.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    live.replaceWith(document.adoptNode(fresh));
    fresh.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = scrolled[index] ?? 0; });
    if (focused) {
      const [selector, index] = focused;
      fresh.querySelectorAll(selector)[index]?.focus({ preventScroll: true });
    }
  };

  const place = (live, element) => {
    const href = element.getAttribute("href");
    const selector = href === null ? element.localName : `a[href="${CSS.escape(href)}"]`;
    return [selector, [...live.querySelectorAll(selector)].indexOf(element)];
  };

  const load = async (address) => {
    const mine = ++asked;
    try {
      const answer = await fetch(address, { credentials: "same-origin", headers: { Accept: "text/html" } });
      if (answer.redirected || answer.status === 401) { location.reload(); return; }
      if (!answer.ok) throw new Error(`it answers with ${answer.status}`);
      const text = await answer.text();
      if (mine !== asked) return;
      replace(text);
      note("");
    } catch (error) {
      if (mine === asked) note(`The console does not answer (${error.message}). What you see is older.`);
    }
  };

  setInterval(() => { if (!document.hidden) load(location.href); }, seconds * 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) load(location.href); });

  const form = document.querySelector("form.search");
  if (!form) return;
  let typing = 0;
  const search = () => {
    const words = new URLSearchParams(new FormData(form));
    for (const [name, value] of [...words]) if (!value) words.delete(name);
    const address = words.size ? `/?${words}` : "/";
    history.replaceState(null, "", address);
    load(address);
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); search(); });
  form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, 250); });
})();
