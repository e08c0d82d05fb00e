// How an element is shown: its knobs as native inputs, a sentence that a screen reader follows, its figures.

import { changed, checked } from "./state.js";

export const COLORS = { blue: "#3987e0", orange: "#d9730d", green: "#2f9e6e", pink: "#c2569b", gold: "#a98500", grey: "#8a8f98" };
const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "g", "line", "path", "circle", "rect", "text", "title"]);

/** An HTML or SVG element with these attributes and children. */
export function node(tag, attributes = {}, ...children) {
  const made = SHAPES.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  made.append(...children.flat().filter((child) => child !== undefined));
  return made;
}

/** Show an element in `el`; `element` is { title, knobs, compute, say, draw }. Returns what stops it. */
export function mount({ model, el }, { title, knobs, compute, say, draw }) {
  const data = model.get("data") ?? {}, all = knobs(data);
  const turn = (values) => {
    model.set("state", changed(all, { ...checked(all, model.get("state") ?? {}), ...values }));
    model.save_changes();
  };
  const controls = all.map((knob) => control(knob, (value) => turn({ [knob.name]: value })));
  const sentence = node("output", { class: "says", "aria-live": "polite" }), figures = node("div", { class: "figures" });
  const reset = node("button", { type: "button" }, "Reset");
  reset.addEventListener("click", () => turn(Object.fromEntries(all.map(({ name, value }) => [name, value]))));
  const update = () => {
    const state = checked(all, model.get("state") ?? {}), found = compute(state, data);
    for (const { show } of controls) show(state);
    sentence.textContent = say(found, state, data);
    figures.replaceChildren(...draw(found, state, data, Math.max(280, Math.min(760, el.clientWidth || 760))));
  };
  el.classList.add("knob");
  el.replaceChildren(
    node("form", { class: "knobs", "aria-label": title }, controls.map(({ shown }) => shown), reset), sentence, figures,
  );
  el.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  let width = el.clientWidth;
  const watch = new ResizeObserver(() => {
    if (el.clientWidth !== width) { width = el.clientWidth; update(); }
  });
  watch.observe(el);
  model.on("change:state", update);
  update();
  return () => { model.off("change:state", update); watch.disconnect(); };
}

function control(knob, turn) {
  if (knob.bars) return bars(knob, turn);
  const { name, label, options, slider } = knob;
  if (options && !slider) {
    const input = node("select", { name }, options.map((option) => node("option", { value: option.value }, option.label)));
    input.addEventListener("input", () => turn(options[input.selectedIndex].value));
    const show = (state) => { input.selectedIndex = options.findIndex(({ value }) => value === state[name]); };
    return { shown: node("label", {}, `${label} `, input), show };
  }
  const ends = options ? [0, options.length - 1] : [knob.min, knob.max];
  const input = node("input", { name, type: "range", min: ends[0], max: ends[1], step: 1 }), reading = node("b", { "aria-hidden": "true" });
  input.addEventListener("input", () => turn(options ? options[input.value].value : Number(input.value)));
  const show = (state) => {
    const place = options ? options.findIndex(({ value }) => value === state[name]) : state[name];
    const text = options ? options[place].label : place.toLocaleString("en");
    input.value = place;
    input.setAttribute("aria-valuetext", text);
    reading.textContent = text;
  };
  return { shown: node("label", {}, `${label} `, reading, input), show };
}

/** A slider for each bar; a pointer draws over all of them. */
function bars({ name, label, bars: labels }, turn) {
  let heights = [];
  const inputs = labels.map((text) => node("input", { type: "range", min: 0, max: 9, step: 1, "aria-label": `${label}: ${text}` }));
  const set = (i, height) => {
    if (heights[i] !== height) turn(heights.map((old, j) => (j === i ? height : old)).join(""));
  };
  inputs.forEach((input, i) => input.addEventListener("input", () => set(i, Number(input.value))));
  const columns = labels.map((text, i) => node("span", {}, inputs[i], node("small", { "aria-hidden": "true" }, text)));
  const field = node("div", { class: "bars" }, columns);
  const paint = (event) => {
    if (!(event.buttons & 1)) return;
    event.preventDefault();
    const i = inputs.findIndex((input) => {
      const box = input.parentNode.getBoundingClientRect();
      return box.left <= event.clientX && event.clientX < box.right;
    });
    if (i < 0) return;
    const box = inputs[i].getBoundingClientRect();
    set(i, Math.max(0, Math.min(9, Math.round(9 * (box.bottom - event.clientY) / box.height))));
  };
  field.addEventListener("pointerdown", paint);
  field.addEventListener("pointermove", paint);
  const show = (state) => {
    heights = [...state[name]].map(Number);
    inputs.forEach((input, i) => {
      input.value = heights[i];
      input.style.setProperty("--height", heights[i] / 9);
    });
  };
  return { shown: node("fieldset", {}, node("legend", {}, label), field), show };
}

// ------------------------------------------------------------------------------------------------------------- figures

const WORDS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A number in few characters: 1.5k, 20M, 0.001. */
export function short(x) {
  const [size, unit] = WORDS.find(([least]) => Math.abs(x) >= least) ?? [1, ""];
  if (x && Math.abs(x) < 1e-3) return exponent(x);
  return `${Number((x / size).toPrecision(3))}${unit}`;
}

/** A number as a digit and a power of ten: 2e−16; and 0. */
export const exponent = (x) => (x ? x.toExponential(0).replace("-", "−").replace("+", "") : "0");

function ticks({ min, max, log }, room) {
  if (log) {
    const first = Math.ceil(Math.log10(min) - 1e-9), last = Math.floor(Math.log10(max) + 1e-9);
    const step = Math.max(1, Math.ceil((last - first + 1) / room));
    return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, i) => 10 ** (first + i * step));
  }
  const rough = (max - min) / room, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(min / step - 1e-9);
  return Array.from({ length: Math.floor(max / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

/**
 * A figure with two axes.
 * @param x, y { label, min, max, log }
 * @param marks [{ label, color, dash, line: [[x, y], ...] } | { label, color, hollow, dots: [[x, y, words], ...] }
 *   | { label, color, dash, at: x }]; marks without a label are not in the legend
 */
export function plot({ title, width, height = 250, x, y, marks }) {
  const left = 54, right = width - 12, top = 10, bottom = height - 40;
  const scale = ({ min, max, log }, from, to) => (value) => {
    const place = log ? Math.log(Math.min(max, Math.max(min, value)) / min) / Math.log(max / min) : (value - min) / (max - min);
    return from + (to - from) * place;
  };
  const across = scale(x, left, right), up = scale(y, bottom, top);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title });
  for (const value of ticks(x, Math.max(3, width / 90))) {
    svg.append(node("line", { class: "grid", x1: across(value), x2: across(value), y1: top, y2: bottom }),
      node("text", { x: across(value), y: bottom + 15, "text-anchor": "middle" }, short(value)));
  }
  for (const value of ticks(y, 6)) {
    svg.append(node("line", { class: "grid", x1: left, x2: right, y1: up(value), y2: up(value) }),
      node("text", { x: left - 6, y: up(value) + 4, "text-anchor": "end" }, short(value)));
  }
  svg.append(node("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.label),
    node("text", { x: -(top + bottom) / 2, y: 12, transform: "rotate(-90)", "text-anchor": "middle" }, y.label));
  for (const { line, dots, at, color, dash, hollow } of marks) {
    if (at !== undefined) {
      svg.append(node("line", { x1: across(at), x2: across(at), y1: top, y2: bottom, stroke: color, "stroke-width": 2, "stroke-dasharray": dash }));
    }
    if (line) {
      const path = line.map(([a, b], i) => `${i ? "L" : "M"}${across(a).toFixed(1)} ${up(b).toFixed(1)}`).join("");
      svg.append(node("path", { d: path, fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash }));
    }
    for (const [a, b, words] of dots ?? []) {
      const look = hollow ? { fill: "none", stroke: color, "stroke-width": 1.4, r: 3.2 } : { fill: color, r: 4 };
      svg.append(node("circle", { cx: across(a), cy: up(b), ...look }, words ? node("title", {}, words) : undefined));
    }
  }
  const named = marks.filter(({ label }) => label);
  const legend = node("figcaption", {}, named.map(({ label, color, dots, hollow, dash }) =>
    node("span", {}, node("i", { class: dots ? "dot" : dash ? "dashed" : "stroke", style: `color: ${color}${hollow ? "; background: none" : ""}` }), label)));
  return node("figure", {}, svg, named.length ? legend : undefined);
}

/** A table: `head` and rows of text; the first cell of a row names it. */
export function table(caption, head, rows) {
  return node("div", { class: "wide", role: "region", "aria-label": caption, tabindex: 0 }, node("table", {},
    node("caption", {}, caption),
    node("thead", {}, node("tr", {}, head.map((text) => node("th", { scope: "col" }, text)))),
    node("tbody", {}, rows.map(([first, ...rest]) =>
      node("tr", {}, node("th", { scope: "row" }, first), rest.map((text) => node("td", {}, text)))))));
}
