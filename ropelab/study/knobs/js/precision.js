// Precision: round positions, frequencies, angles and tables, and see how far each angle and each rotated pair is off.
// The bound is the bound in ropelab.study.topics.precision.methods, which follows from the formats alone.

import { COLORS, exponent, mount, node, plot } from "./view.js";

const BF16 = 8, TF32 = 11, FP32 = 24, FP64 = 53;
const LAST = 24; // positions end at 2^24, which float32 still counts exactly
const EVENLY = 32;
const REFERENCE = 2 ** -50;
const option = (value, label = value.toLocaleString("en")) => ({ value, label });

export const knobs = ({ models }) => [
  { name: "model", label: "Frequencies of", value: "", options: [option("", "128 features and the base below"), ...models.map(({ name }) => option(name, name))] },
  { name: "base", label: "Base", value: 500000, slider: true, options: [100, 1000, 10000, 150000, 500000, 1000000, 10000000].map((b) => option(b)) },
  { name: "length", label: "Positions up to", value: 131072, slider: true, options: Array.from({ length: LAST - 3 }, (_, k) => option(2 ** (k + 4))) },
  { name: "positions", label: "Positions", value: "exact", options: [option("exact", "exact (int64 or float32)"), option("tf32", "TF32"), option("bf16", "bfloat16")] },
  { name: "frequencies", label: "Frequencies", value: "float32", options: [option("float64", "float64"), option("float32", "float32"), option("tf32", "TF32"), option("bf16", "bfloat16")] },
  { name: "angles", label: "Angles, cosines and sines", value: "float32", options: [option("float64", "float64"), option("float32", "float32")] },
  { name: "tables", label: "Tables", value: "float32", options: [option("float32", "float32"), option("bf16", "bfloat16")] },
];

/** `x` rounded to `digits` significant binary digits, to nearest, ties to even; exponents have no limits. */
export function round(x, digits) {
  if (digits === FP32) return Math.fround(x);
  if (x === 0 || digits >= FP64) return x;
  const scale = 2 ** (digits - 1) / ufp(x), scaled = x * scale, low = Math.floor(scaled), rest = scaled - low;
  return (rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low) / scale;
}

/** The largest power of two up to |x|, and 0 for 0. */
export function ufp(x) {
  if (x === 0) return 0;
  const size = Math.abs(x), power = 2 ** Math.floor(Math.log2(size));
  return power > size ? power / 2 : 2 * power <= size ? 2 * power : power;
}

/** Positions beyond top/2 up to top: evenly spaced, and where formats turn from rounding down to rounding up. */
export function octave(top) {
  const first = Math.floor(top / 2) + 1, chosen = new Set([top]);
  for (let i = 0; i < EVENLY; i += 1) chosen.add(first + Math.floor(((top - first) * i) / EVENLY));
  for (let step = 1; step < top; step *= 2) {
    for (const edge of [top / 2 + step - 1, top / 2 + step, top / 2 + step + 1]) if (edge >= first && edge <= top) chosen.add(edge);
  }
  return [...chosen].sort((a, b) => a - b);
}

/** The significant digits of each rounding, in order, and the error of a pair (cos, sin) at its own angle. */
function formats({ positions, frequencies, angles, tables }) {
  const p = { exact: [], tf32: [TF32], bf16: [BF16] }[positions];
  const f = { float64: [], float32: [FP32], tf32: [FP32, TF32], bf16: [FP32, BF16] }[frequencies];
  const digits = (p.at(-1) ?? LAST) + (f.at(-1) ?? FP64); // the digits of the exact product
  const products = [...(digits > FP64 ? [FP64] : []), ...(angles === "float32" && digits > FP32 ? [FP32] : [])];
  const wave = (t, halves = 1) => Math.SQRT2 * halves * 2 ** -(t + 1);
  const library = angles === "float32" ? wave(FP32, 4) : wave(FP32) + wave(FP64, 4);
  return { p, f, products, wave: library + (tables === "bf16" ? wave(BF16) : 0), bf16: tables === "bf16" };
}

const all = (x, digits) => digits.reduce(round, x);
const slack = (x, digits) => digits.reduce((sum, t) => sum + 2 ** -t, 0) * ufp(x);
const slackOnce = (x, digits) => (x === ufp(x) ? 0 : slack(x, digits));

function angleBound(p, f, { p: positions, f: frequencies, products }) {
  const a = positions.length && p > 2 ** Math.min(...positions) ? slackOnce(p, positions) : 0;
  const drift = slackOnce(f, frequencies), off = f + drift;
  const noise = a * off + slack((p + a) * off, products);
  return (p * drift + noise) * (1 + 2 ** -48);
}

/** The errors of the planes at some positions: of the angle (rad) and of the rotated pair, with their bounds. */
function errors(tops, inverse, way, pairs) {
  const found = inverse.map(() => ({ angle: 0, bound: 0, output: 0, outputBound: 0 }));
  inverse.forEach((f, plane) => {
    const worst = found[plane], head = round(f, 26), tail = f - head, own = all(f, way.f);
    for (const p of tops) {
      const angle = all(all(p, way.p) * own, way.products), high = p * head, low = p * tail;
      const bound = angleBound(p, f, way);
      worst.angle = Math.max(worst.angle, Math.abs(angle - high - low));
      worst.bound = Math.max(worst.bound, bound);
      if (!pairs) continue;
      const stored = (x) => (way.bf16 ? round(Math.fround(x), BF16) : Math.fround(x));
      const [c, s] = [Math.cos(high), Math.sin(high)], [dc, ds] = [Math.cos(low), Math.sin(low)];
      const output = Math.hypot(stored(Math.cos(angle)) - (c * dc - s * ds), stored(Math.sin(angle)) - (s * dc + c * ds));
      worst.output = Math.max(worst.output, output);
      worst.outputBound = Math.max(worst.outputBound, 2 * Math.sin(Math.min(bound, Math.PI) / 2) + way.wave + REFERENCE);
    }
  });
  return found;
}

const most = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const rightBits = (error) => Math.max(0, -Math.log2(error));

export function compute(state, { models }) {
  const model = models.find(({ name }) => name === state.model);
  const inverse = model?.frequencies ?? Array.from({ length: 64 }, (_, i) => state.base ** -((2 * i) / 128));
  const way = formats(state), tops = Array.from({ length: Math.log2(state.length) + 1 }, (_, k) => 2 ** k);
  const octaves = tops.map((top) => {
    const found = errors(octave(top), inverse, way, false);
    return { position: top, error: most(found.map((one) => one.angle)), bound: most(found.map((one) => one.bound)) };
  });
  const last = errors(octave(state.length), inverse, way, true), radians = octaves.at(-1).error;
  const output = most(last.map((one) => one.output)), outputBound = most(last.map((one) => one.outputBound));
  return {
    octaves, radians, bound: octaves.at(-1).bound, plane: last.findIndex(({ angle }) => angle === radians),
    planes: last.map(({ angle, bound }) => ({ error: angle, bound })), output, outputBound,
    bits: rightBits(output), boundBits: rightBits(outputBound), longest: model?.length ?? null,
  };
}

const KNOWN = {
  "exact float32 float32 float32": "This is the usual way, positions.float() * inv_freq.float().",
  "exact bf16 float32 float32": "This is a model cast by .to(bfloat16), frequencies included.",
  "bf16 float32 float32 float32": "This is what positions in bfloat16 do.",
  "tf32 tf32 float32 float32": "This is an outer product on tensor cores in TF32.",
  "exact float64 float64 float32": "This is ropelab.rotary_table.",
  "exact float64 float64 bf16": "This is a table that is built in float64 and stored in bfloat16.",
};

export function say({ radians, bound, bits, boundBits, plane, longest }, { positions, frequencies, angles, tables, length, model }) {
  const lost = radians ? `Among the positions tried an angle is off by ${radians.toPrecision(3)} rad (pair ${plane})` : "No angle that was tried is off";
  const turns = radians >= 2 * Math.PI ? `, ${(radians / (2 * Math.PI)).toPrecision(3)} full turns` : "";
  const known = KNOWN[`${positions} ${frequencies} ${angles} ${tables}`] ?? "";
  const context = longest ? ` The longest context of ${model} has ${longest.toLocaleString("en")} tokens.` : "";
  return `${lost}${turns} at positions up to ${length.toLocaleString("en")}; the formats allow ${bound ? bound.toPrecision(3) : "0"} rad. A rotated pair keeps `
    + `${bits.toFixed(1)} right bits, of which the bound guarantees ${boundBits.toFixed(1)}; a bfloat16 feature has 8.${context} ${known}`.trimEnd();
}

const LEAST = 1e-12;

function draw({ octaves, planes, radians, bound, longest }, { length }, _, width) {
  const beside = width > 620, size = beside ? (width - 16) / 2 : width;
  const top = 10 ** Math.ceil(Math.log10(Math.max(1e-2, bound, 2 * Math.PI)));
  const y = { label: "radians lost", min: LEAST, max: top, log: true };
  const turn = (a, b) => ({ line: [[a, 2 * Math.PI], [b, 2 * Math.PI]], color: COLORS.grey, dash: "2 3", label: "a full turn" });
  const context = longest && longest <= length ? [{ at: longest, color: COLORS.green, dash: "4 3", label: "longest context" }] : [];
  const grows = plot({
    title: `The largest error of an angle grows with the position, to ${exponent(radians)} rad at ${length.toLocaleString("en")}; the bound there is ${exponent(bound)} rad.`,
    width: size, x: { label: "position", min: 1, max: length, log: true }, y,
    marks: [
      { line: octaves.map((one) => [one.position, one.bound]), color: COLORS.orange, dash: "6 4", label: "bound" },
      { line: octaves.map((one) => [one.position, one.error]), color: COLORS.blue },
      { dots: octaves.map((one) => [one.position, one.error, `${one.position}: ${exponent(one.error)} rad`]), color: COLORS.blue, label: "largest error of the positions tried" },
      turn(1, length), ...context,
    ],
  });
  const each = plot({
    title: `The largest error of each pair's angle, beside its bound: the fastest pairs lose most.`,
    width: size, x: { label: "pair, the fastest first", min: 0, max: Math.max(1, planes.length - 1) }, y,
    marks: [
      { line: planes.map((one, i) => [i, one.bound]), color: COLORS.orange, dash: "6 4", label: "bound" },
      { dots: planes.map((one, i) => [i, one.error, `pair ${i}: ${exponent(one.error)} rad`]), color: COLORS.blue, label: "largest error of the positions tried" },
      turn(0, planes.length - 1),
    ],
  });
  return [node("div", { class: "row" }, grows, each)];
}

export function render(view) {
  return mount(view, { title: "Precision", knobs, compute, say, draw });
}

export default { render };
