// The roof: choose a model, tokens, a format and a fusion, and see the bytes that must move, the time of a copy of these
// bytes, and the measured time of each contender with its record.

import { COLORS, mount, node, plot, short, table } from "./view.js";

const SIZES = { bfloat16: 2, float16: 2, float32: 4, float8_e4m3fn: 1 };
const option = (value, label = value.toLocaleString("en")) => ({ value, label });

export const knobs = ({ models, columns, rows }) => {
  const heads = rows.map((row) => columns.slice(5, 8).map((_, i) => row[5 + i]).join(" ")), known = new Set(heads);
  const words = ({ name, q, k, dim }) => `${name}${known.has([q, k, dim].join(" ")) ? " · measured" : ""}`;
  return [
    { name: "model", label: "Model", value: "meta-llama/Llama-3.1-8B", options: models.map((model) => option(model.name, words(model))) },
    { name: "tokens", label: "Tokens", value: 4096, slider: true, options: Array.from({ length: 17 }, (_, i) => option(2 ** i)) },
    { name: "operation", label: "Operation", value: "rotation", options: Object.keys(LAUNCHES).map((name) => option(name)) },
    { name: "fusion", label: "Launches", value: "one", options: [option("one", "one pass"), option("separate", "a launch for each step")] },
    { name: "dtype", label: "Format of q, k and v", value: "bfloat16", options: ["bfloat16", "float16", "float32"].map((name) => option(name)) },
    { name: "cache", label: "Format of the cache, if there is one", value: "bfloat16", options: [option("bfloat16", "as q, k and v"), option("float8_e4m3fn", "float8_e4m3fn")] },
    { name: "order", label: "Order of the axes", value: "bshd", options: ["bshd", "sbhd", "bhsd", "qkv"].map((name) => option(name, name === "qkv" ? "bshd, slices of a projection" : name)) },
  ];
};

// Each function takes the elements of q and of k (v has as many as k), the bytes e of an element, and the bytes c of an
// element of the cache. The tables are left out, because all heads and all layers share them.
const both = (q, k, e) => 2 * e * (q + k), store = (q, k, e, c) => 2 * e * k + 2 * c * k, fused = (q, k, e, c) => e * (q + 2 * k) + e * q + 2 * c * k;
/** Operation -> the launches of one pass, and the launches of separate steps. */
export const LAUNCHES = {
  "rotation": { one: [both], separate: [both] },
  "norm and rotation": { one: [both], separate: [both, both] },
  "rotation and cache": { one: [fused], separate: [both, store] },
  "norm, rotation and cache": { one: [fused], separate: [both, both, store] },
};

/** The bytes that each launch reads and writes. */
export function bytes({ q, k, dim }, tokens, operation, fusion, e, c) {
  return LAUNCHES[operation][fusion].map((count) => tokens * count(q * dim, k * dim, e, c));
}

/** Microseconds of the fastest copy of `count` bytes (read and written): measured copies, with lines between in logarithms. */
export function copyTime(count, copies) {
  const [first, last] = [copies[0], copies.at(-1)];
  if (count <= first[0]) return first[1];
  if (count >= last[0]) return (last[1] * count) / last[0];
  const i = copies.findIndex(([at]) => at >= count), [[a, u], [b, v]] = [copies[i - 1], copies[i]];
  return u * (v / u) ** (Math.log(count / a) / Math.log(b / a));
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
/** A row by the names of its columns; all but the numbers are places in `words`. */
const NUMBERS = new Set(["tokens", "q", "k", "dim", "rotary", "us"]);
const named = (columns, words, row) => Object.fromEntries(columns.map((name, i) => [name, NUMBERS.has(name) ? row[i] : words[row[i]]]));

export function compute(state, { models, columns, rows, words, copies }) {
  const model = models.find(({ name }) => name === state.model), { tokens, operation, fusion, dtype } = state;
  const cached = operation.includes("cache"), cache = state.cache === "bfloat16" ? dtype : state.cache;
  const size = SIZES[dtype], held = SIZES[cache], layout = model.interleaved ? "interleaved" : "split_half";
  const launches = bytes(model, tokens, operation, fusion, size, held), one = sum(bytes(model, tokens, operation, "one", size, held));
  const alike = rows.map((row) => named(columns, words, row)).filter((row) => row.operation === operation && row.dtype === dtype
    && (cached ? row.cache === cache : operation !== "rotation" || row.order === state.order));
  const points = alike.map((row) => ({ ...row, bytes: sum(bytes(row, row.tokens, operation, "one", size, held)) }));
  const own = points.filter((row) => row.q === model.q && row.k === model.k && row.dim === model.dim && row.rotary === model.rotary && row.layout === layout);
  const far = (row) => Math.abs(Math.log(row.tokens / tokens)), least = Math.min(...own.map(far));
  return {
    model, layout, launches, bytes: sum(launches), one, roof: sum(launches.map((count) => copyTime(count, copies))), limit: copyTime(one, copies),
    points, measured: own.filter((row) => far(row) === least).sort((a, b) => a.us - b.us),
  };
}

const kind = (count) => (count >= 1e6 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e3).toFixed(1)} kB`);
const time = (us) => `${us < 100 ? us.toFixed(1) : Math.round(us).toLocaleString("en")} µs`;

export function say({ model, bytes: count, one, roof, limit, measured, launches }, { tokens, operation, fusion }, { gpu }) {
  const forward = measured.filter(({ direction }) => direction === "forward"), first = forward[0], at = measured[0]?.tokens;
  const apart = fusion === "separate" && launches.length > 1 ? ` One pass needs ${kind(one)} and ${time(limit)}.` : "";
  const best = first ? ` At ${at.toLocaleString("en")} tokens the record has ${time(first.us)} for the fastest of ${new Set(forward.map((row) => row.contender)).size} contenders, ${first.contender}.`
    : ` No record has this operation for ${model.q}/${model.k} heads of ${model.dim} in this format.`;
  return `${tokens.toLocaleString("en")} tokens of ${model.q}/${model.k} heads of ${model.dim} features: ${operation} must move ${kind(count)} in ${launches.length === 1 ? "one launch" : `${launches.length} launches`}. `
    + `At the speed of a copy on ${gpu} that takes ${time(roof)}.${apart}${best}`;
}

function draw({ model, points, measured, one, bytes: count, roof, limit }, { operation }, { copies, gpu, records }, width) {
  const chosen = new Set(measured), forward = points.filter(({ direction }) => direction === "forward");
  const words = (row) => `${row.contender}: ${time(row.us)}, ${row.tokens.toLocaleString("en")} tokens of ${row.q}/${row.k} heads of ${row.dim} (${row.study})`;
  const ours = (row) => row.contender.startsWith("ropelab"), dots = (rows) => rows.map((row) => [row.bytes, row.us, words(row)]);
  const most = Math.max(1e9, 2 * count), steps = Array.from({ length: 81 }, (_, i) => 1e4 * (most / 1e4) ** (i / 80));
  const highest = Math.max(3e3, 2 * roof, ...forward.map((row) => row.us));
  const other = forward.filter((row) => !ours(row)), own = forward.filter(ours), held = (row) => chosen.has(row);
  const figure = plot({
    title: `Time against bytes. The roof, a copy, is at ${time(limit)} for the ${kind(one)} of one pass; ${measured.length ? `${measured.length} measured times belong to these heads` : "no measured time belongs to these heads"}.`,
    width, height: 320, x: { label: "bytes that one pass must move", min: 1e4, max: most, log: true }, y: { label: "µs", min: 1, max: highest, log: true },
    marks: [
      { line: steps.map((x) => [x, copyTime(x, copies)]), color: COLORS.grey, label: "the roof: the fastest copy" },
      { at: Math.max(1e4, one), color: COLORS.green, dash: "4 3", label: "your choice" },
      { dots: dots(other.filter((row) => !held(row))), hollow: true, color: COLORS.orange, label: "other contenders" },
      { dots: dots(own.filter((row) => !held(row))), hollow: true, color: COLORS.blue, label: "ropelab" },
      { dots: dots(other.filter(held)), color: COLORS.orange }, { dots: dots(own.filter(held)), color: COLORS.blue },
      { dots: [[one, roof, `${time(roof)} at the speed of a copy`]], color: COLORS.green },
    ],
  });
  const at = (name, study, direction) => measured.find((row) => row.contender === name && row.study === study && row.direction === direction);
  const lines = [...new Map(measured.map((row) => [`${row.contender} ${row.study}`, row])).values()].map(({ contender, study }) => {
    const [f, b] = ["forward", "backward"].map((direction) => at(contender, study, direction));
    return [contender, f ? time(f.us) : "", f ? (copyTime(f.bytes, copies) / f.us).toFixed(2) : "", b ? time(b.us) : "", study];
  });
  const used = [...new Set(measured.map(({ study }) => study))].map((study) => records[study]).join(", ");
  if (!lines.length) return [figure, node("p", {}, "No table: no record has this operation for these heads in this format. Models marked “measured” have a record of a rotation.")];
  return [figure, table(
    `${operation[0].toUpperCase()}${operation.slice(1)}: ${measured[0].tokens.toLocaleString("en")} tokens of ${model.q}/${model.k} heads of ${model.dim}, ${gpu}`,
    ["contender", "forward", "roof / forward", "backward", "record"], lines), node("p", {}, `Records: ${used}. The tables of cosines and sines are not counted: all heads and layers share them.`)];
}

export function render(view) {
  return mount(view, { title: "The roof", knobs, compute, say, draw });
}

export default { render };
