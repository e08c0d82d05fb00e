// Packing: draw the lengths of packed sequences, and see the blocks and the time of each launch strategy, beside the
// measured points of the record te_kernels (forward and backward, 32 heads of 128, bfloat16).

import { COLORS, mount, node, plot, short, table } from "./view.js";

const LENGTHS = Array.from({ length: 13 }, (_, k) => 2 ** (k + 4));
const HEADS = 32;
const FLASH_TOKENS = 8, FLASH_HEADS = 2; // BLOCK_M and BLOCK_H of flash_attn/ops/triton/rotary.py, 2.8.3
const option = (value, label = value.toLocaleString("en")) => ({ value, label });

export const knobs = ({ ropelab }) => [
  { name: "lengths", label: "Share of the tokens in sequences of this length: draw with a pointer, or use the arrow keys", value: "0001121000050", bars: LENGTHS.map((n) => (n < 1024 ? `${n}` : `${n / 1024}k`)) },
  { name: "tokens", label: "Tokens in all", value: 65536, slider: true, options: ropelab.map(([tokens]) => option(tokens)) },
  { name: "rows", label: "Rows of the table of angles", value: 0, slider: true, options: [option(0, "as long as the longest sequence"), ...[8192, 16384, 32768, 65536].map((rows) => option(rows))] },
];

/** Pairs [length, count] that hold all tokens: the shares from the longest to the shortest, then the remainder. */
export function sequences(shares, tokens) {
  const digits = [...shares].map(Number), total = digits.reduce((a, b) => a + b, 0), found = [];
  let left = 0;
  for (let i = LENGTHS.length - 1; i >= 0; i -= 1) {
    if (!digits[i]) continue;
    const length = Math.min(LENGTHS[i], tokens), budget = left + (digits[i] * tokens) / total, count = Math.floor(budget / length + 1e-9);
    left = budget - count * length;
    if (count) found.push([length, count]);
  }
  const held = found.reduce((sum, [length, count]) => sum + length * count, 0);
  return tokens > held ? [...found, [tokens - held, 1]] : found;
}

/** Piecewise linear through points [x, y] in logarithms; below them y is constant, and above them it has `slope`. */
export function between(points, x, slope) {
  const [first, last] = [points[0], points.at(-1)];
  if (x <= first[0]) return first[1];
  if (x >= last[0]) return last[1] * (x / last[0]) ** slope;
  const i = points.findIndex(([at]) => at >= x), [[a, u], [b, v]] = [points[i - 1], points[i]];
  return Math.exp(Math.log(u) + (Math.log(v / u) * Math.log(x / a)) / Math.log(b / a));
}

/** Microseconds, forward and backward, of each strategy for n sequences; null for a strategy that the record lacks. */
export function estimate({ n, longest, tokens, rows }, { fits, ropelab, linear, most }) {
  const part = tokens / most, grid = (fit, dead) => (fit ? fit.live * part + fit.each * dead : null);
  return {
    old: grid(fits.old, n * rows - tokens), linear: linear.length ? between(linear, n, 0) * part : null,
    flash: grid(fits.flash, n * longest - tokens), ropelab: between(ropelab, tokens, 1),
  };
}

/** The grid that each condition takes. Both know the numbers of sequences, rows and tokens, and no length. */
export const conditions = ({ n, rows, tokens }) => ({
  first: tokens > 0 && n >= 64 && n * rows >= 8 * tokens ? "linear" : "legacy",
  merged: tokens > 0 && n * rows > 2 * tokens && n * rows - tokens >= 65536 ? "linear" : "legacy",
});

export function compute({ lengths, tokens, rows: least }, data) {
  const found = sequences(lengths, tokens), n = found.reduce((sum, [, count]) => sum + count, 0), longest = Math.max(...found.map(([length]) => length));
  const rows = Math.max(least, longest), packing = { n, longest, tokens, rows }, us = estimate(packing, data);
  const heads = Math.ceil(HEADS / FLASH_HEADS), full = found.reduce((sum, [length, count]) => sum + count * Math.ceil(length / FLASH_TOKENS), 0);
  const all = n * Math.ceil(longest / FLASH_TOKENS);
  return {
    ...packing, sequences: found, conditions: conditions(packing),
    strategies: {
      old: { blocks: n * rows, dead: n * rows - tokens, rows: n * rows - tokens, us: us.old },
      linear: { blocks: tokens, dead: 0, rows: 0, us: us.linear },
      flash: { blocks: all * heads, dead: (all - full) * heads, rows: n * longest - tokens, us: us.flash },
      ropelab: { blocks: data.programs * tokens, dead: 0, rows: 0, us: us.ropelab },
    },
    errors: errors(data),
  };
}

/** For each strategy the error of the estimate: the median and the largest of |estimate / time - 1|. */
export function errors(data) {
  return Object.fromEntries(Object.keys(NAMES).map((name) => {
    const off = data.cells.filter((cell) => cell[name] !== null).map((cell) => Math.abs(estimate(cell, data)[name] / cell[name] - 1)).sort((a, b) => a - b);
    return [name, off.length ? { cells: off.length, median: off[off.length >> 1], largest: off.at(-1) } : null];
  }));
}

const NAMES = {
  old: "old grid: a block for each row and sequence", linear: "new grid: a block for each token",
  flash: "flash-attn: blocks for the longest of all", ropelab: "ropelab: a position for each token",
};
const LOOKS = { old: COLORS.orange, linear: COLORS.green, flash: COLORS.pink, ropelab: COLORS.blue };
const time = (us) => (us === null ? "not measured" : us < 1e4 ? `${Math.round(us).toLocaleString("en")} µs` : `${Math.round(us / 1e3)} ms`);

export function say({ n, longest, rows, strategies: { old, linear, ropelab }, conditions: { first, merged } }, { tokens }) {
  const grid = { linear: "new", legacy: "old" };
  return `${n.toLocaleString("en")} sequences of up to ${longest.toLocaleString("en")} tokens share ${tokens.toLocaleString("en")} tokens. Under a table of ${rows.toLocaleString("en")} rows `
    + `the old grid starts ${short(old.blocks)} blocks, ${(100 * (old.dead / old.blocks)).toFixed(1)} % of them without a token, and takes about ${time(old.us)}; `
    + `the new grid takes ${time(linear.us)}, ropelab ${time(ropelab.us)}. The first condition takes the ${grid[first]} grid, the merged one the ${grid[merged]} grid.`;
}

const NONE = 1e3;

/** The measured cell with the same tokens that is nearest in sequences and rows, in logarithms. */
function nearest({ n, rows, tokens }, cells) {
  const far = (cell) => Math.abs(Math.log(cell.n / n)) + Math.abs(Math.log(cell.rows / rows));
  return cells.filter((cell) => cell.tokens === tokens).sort((a, b) => far(a) - far(b))[0];
}

function draw(found, { tokens }, data, width) {
  const { strategies } = found, cells = data.cells.filter((cell) => cell.tokens === tokens);
  const own = { old: (cell) => cell.n * cell.rows - cell.tokens, linear: () => 0, flash: (cell) => cell.n * cell.longest - cell.tokens, ropelab: () => 0 };
  const steps = Array.from({ length: 41 }, (_, i) => NONE * 10 ** (i * 0.1375)), part = tokens / data.most;
  const marks = ["old", "flash"].filter((name) => data.fits[name]).map((name) => ({
    line: steps.map((dead) => [dead, data.fits[name].live * part + data.fits[name].each * dead]), color: LOOKS[name], dash: "5 4",
  }));
  for (const name of Object.keys(NAMES)) {
    const dots = cells.filter((cell) => cell[name] !== null).map((cell) => [Math.max(NONE, own[name](cell)), cell[name],
      `${NAMES[name]}: ${time(cell[name])}, ${cell.n} sequences of up to ${cell.longest}, ${cell.rows} rows`]);
    marks.push({ dots, hollow: true, color: LOOKS[name] });
  }
  for (const [name, { rows, us }] of Object.entries(strategies)) {
    if (us !== null) marks.push({ dots: [[Math.max(NONE, rows), us, `${NAMES[name]}: about ${time(us)}`]], color: LOOKS[name], label: NAMES[name] });
  }
  const figure = plot({
    title: `Time against rows without a token: the old grid about ${time(strategies.old.us)}, the new grid ${time(strategies.linear.us)}, ropelab ${time(strategies.ropelab.us)}.`,
    width, height: 300, marks,
    x: { label: "rows started without a token (left edge: none)", min: NONE, max: 3e8, log: true },
    y: { label: "µs, forward and backward", min: 40, max: 4e5, log: true },
  });
  const near = nearest(found, data.cells), rows = Object.entries(strategies).map(([name, { blocks, dead, us }]) => [
    NAMES[name], short(blocks), `${(100 * (dead / blocks)).toFixed(1)} %`, time(us), near && near[name] !== null ? time(near[name]) : "",
    found.errors[name] ? `${(100 * found.errors[name].median).toFixed(1)} %, ${(100 * found.errors[name].largest).toFixed(0)} %` : "",
  ]);
  const words = near ? `Nearest measured packing: ${near.n.toLocaleString("en")} sequences of up to ${near.longest.toLocaleString("en")} tokens, ${near.rows.toLocaleString("en")} rows.` : "";
  return [
    figure, node("p", {}, `Filled: the packing that you drew, estimated. Hollow: measured (${data.about}). Dashed: the time of live blocks plus a time for each row without a token. A share that is too small for one sequence goes to the next shorter length. ${words}`),
    table("Blocks of a pass, and the time of both", ["strategy", "blocks", "without a token", "estimated", "nearest measured", "estimates off by (median, most)"], rows),
    node("p", {}, `Record: ${data.record}`),
  ];
}

export function render(view) {
  return mount(view, { title: "Packing", knobs, compute, say, draw });
}

export default { render };
