// What is shown, as the page's address has it. The address is the only copy: views read it here and change it only with `set`.

const whole = (text) => (/^\d{1,15}$/.test(text) ? Number(text) : null);
const name = (text) => text;
const time = (text) => (/^\d{1,10}$/.test(text) ? Number(text) : null);
// A column's heading, after a minus sign if the largest value comes first.
const sorting = (text) => (/^-?[a-z0-9 ]{1,40}$/i.test(text) ? text : null);

// Seconds; null: the whole job.
export const LASTS = { "30s": 30, "5m": 300, "30m": 1800, all: null };

// Each parameter of the address, and what its text means; null: not valid, as if it were absent.
const PARAMETERS = {
  job: name,
  // The end of the job: a key of LASTS. Or a time range in Unix seconds.
  last: (text) => (text in LASTS ? text : null),
  from: time,
  to: time,
  rank: whole,
  group: name,
  op: name,
  size: whole,
  // The rank whose own part of the page is open.
  open: whole,
  paused: (text) => (text === "1" ? 1 : null),
  "sort-ranks": sorting,
  "sort-operations": sorting,
  "sort-chosen": sorting,
  "sort-flight": sorting,
  "sort-rank-flight": sorting,
  "sort-rank-steps": sorting,
  "sort-rank-operations": sorting,
};

const listeners = [];
let now = read();

function read() {
  const given = new URLSearchParams(location.search);
  const found = Object.fromEntries(Object.entries(PARAMETERS).map(([key, parse]) => [key, given.has(key) ? parse(given.get(key)) : null]));
  const whole = found.from !== null && found.to !== null && found.from < found.to;
  return whole ? { ...found, last: null } : { ...found, from: null, to: null };
}

// Removes the time range: the page shows the present again.
export const LIVE = { last: null, from: null, to: null };
export const NO_FILTER = { rank: null, group: null, op: null, size: null };

// A value is null where the address has none.
export const state = () => now;

// The address with other parameters; null removes one.
export function address(changes) {
  const query = new URLSearchParams(Object.entries({ ...now, ...changes }).filter(([, value]) => value !== null)).toString();
  return query ? `?${query}` : location.pathname;
}

// Changes parameters. The Back button undoes it, unless it only replaces the entry of the browser's history.
export function set(changes, { replace = false } = {}) {
  const next = address(changes);
  if (next === address({})) return;
  history[replace ? "replaceState" : "pushState"](null, "", next);
  changed();
}

// Calls `listener` after each change, with the state before it.
export const onChange = (listener) => listeners.push(listener);

function changed() {
  const before = now;
  now = read();
  for (const listener of listeners) listener(before);
}

addEventListener("popstate", changed);
