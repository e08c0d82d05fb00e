// Turn the pairs: a position turns each pair of features, a score depends on the distance alone, and the two layouts
// are one rotation in two orders of the features.

import { COLORS, exponent, mount, node, plot } from "./view.js";

const DISTANCES = 256;
const option = (value, label = value.toLocaleString("en")) => ({ value, label });

export const knobs = () => [
  { name: "position", label: "Position of the token", value: 3, min: 0, max: 512 },
  { name: "pair", label: "Pair", value: 1, min: 0, max: 63 },
  { name: "base", label: "Base", value: 10000, slider: true, options: [100, 1000, 10000, 150000, 500000, 1000000, 10000000].map((b) => option(b)) },
  { name: "dim", label: "Features that rotate", value: 16, slider: true, options: [4, 8, 16, 32, 64, 128].map((d) => option(d)) },
  { name: "distance", label: "Tokens between query and key", value: 8, min: 0, max: DISTANCES },
  { name: "layout", label: "Layout", value: "split_half", options: [option("split_half", "split half"), option("interleaved", "interleaved")] },
];

/** The inverse frequencies base ** (-2 i / dim), rad per position. */
export const frequencies = (dim, base) => Array.from({ length: dim / 2 }, (_, i) => base ** -((2 * i) / dim));

/** The two features of each pair. */
export const features = (dim, layout) =>
  Array.from({ length: dim / 2 }, (_, i) => (layout === "interleaved" ? [2 * i, 2 * i + 1] : [i, i + dim / 2]));

/** The index p with x_target = x_source[p]. */
export function permutation(dim, source, target) {
  const from = features(dim, source), to = features(dim, target), order = Array(dim);
  to.forEach((pair, i) => pair.forEach((place, member) => { order[place] = from[i][member]; }));
  return order;
}

/** The score of a query and a key whose pairs are all (1, 0): the mean over the pairs of cos(distance * frequency). */
export const score = (distance, inverse) => inverse.reduce((sum, f) => sum + Math.cos(distance * f), 0) / inverse.length;

export function compute({ position, pair, base, dim, distance, layout }) {
  const inverse = frequencies(dim, base), shown = Math.min(pair, dim / 2 - 1), other = layout === "interleaved" ? "split_half" : "interleaved";
  const angle = position * inverse[shown];
  // q at `position` and k at `position - distance`, both rotated, then multiplied.
  const rotated = inverse.reduce((sum, f) => {
    const [a, b] = [position * f, (position - distance) * f];
    return sum + Math.cos(a) * Math.cos(b) + Math.sin(a) * Math.sin(b);
  }, 0) / inverse.length;
  return {
    pair: shown, frequency: inverse[shown], angle, turned: [Math.cos(angle), Math.sin(angle)], features: features(dim, layout)[shown],
    scores: Array.from({ length: DISTANCES + 1 }, (_, d) => score(d, inverse)), score: score(distance, inverse), rotated,
    permutation: permutation(dim, layout, other),
  };
}

export function say({ pair, frequency, angle, features: [first, second], score: exact, rotated }, { position, distance, layout }) {
  const turns = Math.abs(angle) / (2 * Math.PI);
  return `At position ${position.toLocaleString("en")}, pair ${pair} (features ${first} and ${second}, ${layout.replace("_", " ")}) has turned by `
    + `${angle.toPrecision(4)} rad, ${turns.toPrecision(3)} of a full turn: ${frequency.toPrecision(3)} rad per position. A query at position `
    + `${position} and a key ${distance} before it have the score ${rotated.toFixed(4)}. The distance alone gives `
    + `${exact.toFixed(4)}; the two differ by ${exponent(Math.abs(rotated - exact))}, a rounding.`;
}

function circle({ pair, angle, turned: [cos, sin] }) {
  const size = 250, middle = size / 2, r = 92, at = (c, s, by = r) => [middle + c * by, middle - s * by];
  const [x, y] = at(cos, sin), part = angle % (2 * Math.PI), steps = 48;
  const arc = Array.from({ length: steps + 1 }, (_, i) => at(Math.cos((part * i) / steps), Math.sin((part * i) / steps), 30));
  const svg = node("svg", { viewBox: `0 0 ${size} ${size}`, width: size, height: size, role: "img",
    "aria-label": `Pair ${pair} as an arrow, turned by ${angle.toPrecision(4)} rad from the arrow at position 0.` });
  svg.append(
    node("circle", { cx: middle, cy: middle, r, fill: "none", class: "grid" }),
    node("line", { x1: middle, y1: middle, x2: middle + r, y2: middle, stroke: COLORS.grey, "stroke-width": 3, "stroke-dasharray": "5 4" }),
    node("path", { d: `M${arc.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}`, fill: "none", stroke: COLORS.orange, "stroke-width": 2 }),
    node("line", { x1: middle, y1: middle, x2: x, y2: y, stroke: COLORS.blue, "stroke-width": 4 }),
    node("circle", { cx: x, cy: y, r: 6, fill: COLORS.blue }),
    node("text", { x: middle, y: 14, "text-anchor": "middle" }, `pair ${pair}: (${cos.toFixed(3)}, ${sin.toFixed(3)})`),
  );
  return node("figure", {}, svg);
}

/** Two rows of features, and a line from each feature of the layout above to its place below. */
function layouts({ pair, permutation: order }, { dim, layout }, width) {
  const other = layout === "interleaved" ? "split_half" : "interleaved", cell = (width - 20) / dim, rows = [34, 112];
  const svg = node("svg", { viewBox: `0 0 ${width} 160`, width, height: 160, role: "img", "aria-label":
    `The order of the ${dim} features in the layout ${layout.replace("_", " ")} above, and in the other layout below; lines join the same feature, pair ${pair} is marked.` });
  const names = [layout, other].map((name) => name.replace("_", " ")), chosen = [features(dim, layout)[pair], features(dim, other)[pair]];
  const middle = (i) => 10 + (i + 0.5) * cell;
  order.forEach((from, to) => {
    const marked = chosen[1].includes(to);
    svg.append(node("line", { x1: middle(from), y1: rows[0] + 22, x2: middle(to), y2: rows[1],
      stroke: marked ? COLORS.blue : COLORS.grey, "stroke-width": marked ? 2.5 : 1, "stroke-opacity": marked ? 1 : 0.45 }));
  });
  rows.forEach((y, row) => {
    svg.append(node("text", { x: 10, y: row ? y + 40 : y - 8 }, names[row]));
    for (let i = 0; i < dim; i += 1) {
      const marked = chosen[row].includes(i);
      svg.append(node("rect", { x: 10 + i * cell, y, width: cell * 0.92, height: 22, rx: 2, fill: marked ? COLORS.blue : COLORS.grey, "fill-opacity": marked ? 1 : 0.3 }));
      if (cell > 15) svg.append(node("text", { x: middle(i) - cell * 0.04, y: y + 15, "text-anchor": "middle" }, row ? order[i] : i));
    }
  });
  return node("figure", {}, svg);
}

function draw(found, state, _, width) {
  const beside = width > 620, curve = found.scores.map((value, d) => [d, value]);
  const scores = plot({
    title: `The score of a query and a key falls and swings with their distance; at ${state.distance} tokens it is ${found.score.toFixed(3)}.`,
    width: beside ? width - 274 : width, height: 250,
    x: { label: "tokens between query and key", min: 0, max: DISTANCES }, y: { label: "score", min: -1, max: 1 },
    marks: [{ line: curve, color: COLORS.orange, label: "from the distance alone" },
      { dots: [[state.distance, found.rotated]], color: COLORS.blue, label: "from the rotated query and key" }],
  });
  return [node("div", { class: "row" }, circle(found), scores), layouts(found, state, width)];
}

export function render(view) {
  return mount(view, { title: "Turn the pairs", knobs, compute, say, draw });
}

export default { render };
