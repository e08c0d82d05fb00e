// The search box, the filters of the ledger, and the hint at what scrolls. Without this script the pages show the same.
"use strict";

// "gpt-oss", "gpt_oss" and "GptOss" are the same name.
const plain = (text) => text.toLowerCase().replace(/[-_]/g, "");

// How well an entry fits a query: its own name, the start of its title, its title, its text, or not at all.
function fit({ head, all }, query, words) {
  if (!words.every((word) => all.includes(word))) return 0;
  if (head === query || head.split(".").pop() === query) return 4;
  if (head.startsWith(query)) return 3;
  return words.every((word) => head.includes(word)) ? 2 : 1;
}

function makeSearch(form) {
  const input = form.querySelector("input"), list = form.querySelector("ol");
  let index;
  const show = () => {
    index ??= window.studyIndex.map(([url, page, title, text]) => ({
      url, page, title, head: plain(title), all: plain(`${title} ${text}`), text,
    }));
    const query = plain(input.value).trim(), words = query.split(/\s+/).filter(Boolean);
    const hits = !words.length ? [] : index
      .map((entry) => [fit(entry, query, words), entry])
      .filter(([rank]) => rank)
      .sort(([a], [b]) => b - a)
      .slice(0, 20);
    list.replaceChildren(...hits.map(([, entry]) => {
      const item = document.createElement("li"), link = document.createElement("a"), text = document.createElement("span");
      const at = Math.max(0, plain(entry.text).indexOf(words[0]) - 40);
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

function makeFilters(filters, claims) {
  const controls = [...filters.querySelectorAll("[data-filter]")], output = filters.querySelector("output");
  const apply = () => {
    for (const claim of claims) {
      claim.hidden = controls.some(({ dataset, value }) => value && claim.dataset[dataset.filter] !== value);
    }
    output.textContent = `${claims.filter((claim) => !claim.hidden).length} of ${claims.length} claims`;
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

// Whatever is wider than its place fades at the side that is hidden, until it has been scrolled there.
function hintAtWidth(box) {
  const look = () => box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
  box.addEventListener("scroll", look, { passive: true });
  for (const seen of [box, ...box.children]) resized.observe(seen);
  return look;
}
const resized = new ResizeObserver(() => looks.forEach((look) => look()));
const scrolls = (element) => getComputedStyle(element).overflowX === "auto";
const looks = [...document.querySelectorAll("main *")].filter(scrolls).map(hintAtWidth);

const here = document.querySelector("nav [aria-current]");
if (here) here.closest("nav").scrollTop = here.offsetTop - 200;
const filters = document.querySelector(".filters");
if (filters) makeFilters(filters, [...document.querySelectorAll("details.claim")]);
if (window.studyIndex) makeSearch(document.querySelector("form.search"));
