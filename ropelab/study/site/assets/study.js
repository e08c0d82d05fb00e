// The search box, and the ledger that sorts and filters. Without this script the pages show the same content.
"use strict";

function makeSearch(form) {
  const input = form.querySelector("input"), list = form.querySelector("ol");
  const index = window.studyIndex.map(([url, page, title, text]) => ({
    url, page, title, head: title.toLowerCase(), all: `${title} ${text}`.toLowerCase(), text,
  }));
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = !words.length ? [] : index
      .filter((entry) => words.every((word) => entry.all.includes(word)))
      .map((entry) => [words.filter((word) => entry.head.includes(word)).length, entry])
      .sort(([a], [b]) => b - a)
      .slice(0, 20);
    list.replaceChildren(...hits.map(([, entry]) => {
      const item = document.createElement("li"), link = document.createElement("a"), text = document.createElement("span");
      const at = Math.max(0, entry.text.toLowerCase().indexOf(words[0]) - 40);
      link.href = entry.url;
      link.textContent = entry.title === entry.page ? entry.title : `${entry.title} (${entry.page})`;
      text.textContent = `${at ? "… " : ""}${entry.text.slice(at, at + 120)}`;
      item.append(link, text);
      return item;
    }));
    if (words.length && !hits.length) {
      list.append(Object.assign(document.createElement("li"), { textContent: "nothing found" }));
    }
    list.hidden = !words.length;
  };
  input.addEventListener("input", show);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    list.querySelector("a")?.click();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { input.value = ""; show(); }
    const links = [input, ...list.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && links[at + step]) { event.preventDefault(); links[at + step].focus(); }
  });
  list.addEventListener("click", () => { list.hidden = true; });
  form.hidden = false;
  input.value = new URLSearchParams(location.search).get("q") ?? "";
  if (input.value) show();
}

function makeSortable(table) {
  const body = table.tBodies[0], original = [...body.rows];
  for (const head of table.tHead.rows[0].cells) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "" }[head.ariaSort ?? ""] ?? "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      const text = (row) => row.cells[head.cellIndex].innerText.trim();
      const rows = [...original];
      if (next) {
        head.setAttribute("aria-sort", next);
        rows.sort((a, b) => (next === "ascending" ? 1 : -1) * text(a).localeCompare(text(b), "en", { numeric: true }));
      }
      body.append(...rows);
    });
  }
}

function makeFilters(filters, table) {
  const controls = [...filters.querySelectorAll("[data-filter]")], output = filters.querySelector("output");
  const rows = [...table.tBodies[0].rows];
  const apply = () => {
    for (const row of rows) {
      row.hidden = !controls.every(({ dataset, value }) => dataset.filter === "words"
        ? value.toLowerCase().split(/\s+/).every((word) => row.textContent.toLowerCase().includes(word))
        : !value || row.dataset[dataset.filter] === value);
    }
    output.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
    const state = new URLSearchParams(location.search);
    for (const { dataset, value } of controls) value ? state.set(dataset.filter, value) : state.delete(dataset.filter);
    history.replaceState(null, "", `${location.pathname}${state.size ? `?${state}` : ""}${location.hash}`);
  };
  const state = new URLSearchParams(location.search);
  for (const control of controls) {
    control.value = state.get(control.dataset.filter) ?? "";
    control.addEventListener("input", apply);
  }
  filters.hidden = false;
  apply();
}

const ledger = document.querySelector("table.ledger");
if (ledger) {
  makeSortable(ledger);
  makeFilters(document.querySelector(".filters"), ledger);
}
if (window.studyIndex) makeSearch(document.querySelector("form.search"));
