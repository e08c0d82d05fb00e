// The values of an element's knobs: which values a knob allows, and where a report page keeps them.
//
// A knob is { name, label, value } with its own value, and one of
//   { options: [{ value, label }] }  a choice; with `slider: true` an ordered choice
//   { min, max }                     an integer
//   { bars: [label, ...] }           a digit from 0 to 9 for each label, together a string such as "0290"

/** The value of every knob: the value in `given` if the knob allows it, otherwise the knob's own value. */
export function checked(knobs, given) {
  return Object.fromEntries(knobs.map((knob) => [knob.name, allowed(knob, given[knob.name])]));
}

/** The values of `state` that differ from the knobs' own values. */
export function changed(knobs, state) {
  return Object.fromEntries(
    knobs.filter(({ name, value }) => state[name] !== value).map(({ name }) => [name, state[name]]),
  );
}

function allowed({ value, options, bars, min, max }, given) {
  if (options) return (options.find((option) => String(option.value) === String(given)) ?? { value }).value;
  if (bars) return new RegExp(`^[0-9]{${bars.length}}$`).test(given) ? String(given) : value;
  const number = Math.round(Number(given ?? NaN));
  return Number.isFinite(number) && given !== "" ? Math.min(max, Math.max(min, number)) : value;
}

/** A model with anywidget's interface whose state is in the URL of the page: `?name.knob=value`. */
export function pageModel(name, data, state) {
  const prefix = `${name}.`, listeners = new Set();
  const inUrl = [...new URLSearchParams(location.search)].filter(([key]) => key.startsWith(prefix));
  const values = { data, state: { ...state, ...Object.fromEntries(inUrl.map(([key, v]) => [key.slice(prefix.length), v])) } };
  return {
    get: (key) => values[key],
    set(key, value) {
      values[key] = value;
      for (const listener of listeners) listener();
    },
    save_changes() {
      const query = new URLSearchParams(location.search);
      for (const key of [...query.keys()]) if (key.startsWith(prefix)) query.delete(key);
      for (const [key, value] of Object.entries(values.state)) query.set(prefix + key, value);
      const search = String(query);
      history.replaceState(null, "", `${location.pathname}${search ? `?${search}` : ""}${location.hash}`);
    },
    on: (_, listener) => listeners.add(listener),
    off: (_, listener) => listeners.delete(listener),
  };
}
