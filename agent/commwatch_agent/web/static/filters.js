// Filters by rank, group, operation and size class.

import { ask } from "./ask.js";
import { each, find, say } from "./elements.js";
import { NO_FILTER, onChange, set, state } from "./state.js";
import { bytes, plain } from "./words.js";

const NAMES = ["rank", "group", "op", "size"];
let askedAgain = false;
const known = { rank: new Set(), group: new Set(), op: new Set(), size: new Set() };

// The size class of an operation: the next power of two. Null: it has no size.
export const sizeClass = (bytes) => (bytes > 0 ? 2 ** Math.ceil(Math.log2(bytes)) : null);

// Whether something with these values passes the filters; values that are not given are not compared.
export function passes(values) {
  return NAMES.every((name) => state()[name] === null || !(name in values) || values[name] === state()[name]);
}

export const filtered = (...names) => names.some((name) => state()[name] !== null);

// Offers values that were seen.
export function offer(values) {
  for (const [name, found] of Object.entries(values)) for (const value of found) if (value !== null) known[name].add(value);
  show();
}

// Asks for all groups, operations and size classes of the last hour of a job that was not shown before.
export function offerAll(job) {
  for (const name of NAMES) known[name].clear();
  askedAgain = false;
  return askAll(job);
}

// Offers what the latest operations are. Before there were any, the answer to `offerAll` had no size class, so that it is asked for again.
export function offerLatest(job, rows) {
  offer({ group: rows.map(({ by }) => by.group), op: rows.map(({ by }) => by.op) });
  if (!rows.length || known.size.size || askedAgain) return;
  askedAgain = true;
  askAll(job);
}

async function askAll(job) {
  try {
    const { rows } = await ask("summary", { job, by: "group,op,size", since: "1h" });
    offer({ group: rows.map((row) => row.by.group), op: rows.map((row) => row.by.op), size: rows.map((row) => row.by.size) });
  } catch {
    // What the events name is still offered.
  }
}

function show() {
  for (const name of NAMES) {
    const chosen = state()[name];
    const numbers = name === "rank" || name === "size";
    const values = [...new Set([...known[name], ...(chosen === null ? [] : [chosen])])].sort(numbers ? (a, b) => a - b : undefined);
    const text = name === "size" ? (value) => `≤ ${bytes(value)}` : plain;
    const options = [["", "all"], ...values.map((value) => [String(value), text(value)])];
    const select = find(`filter-${name}`);
    each(select, "option", options, (option, [value, label]) => {
      if (option.value !== value) option.value = value;
      say(option, label);
    });
    select.value = chosen === null ? "" : String(chosen);
  }
  find("filter-clear").hidden = !filtered(...NAMES);
  say(find("filter-said"), filtered(...NAMES) ? "The filter applies to the timeline, the operations and the operations in flight; bus bandwidth is filtered by operation only. Everything else covers all operations of all ranks." : "");
}

export function beginFilters() {
  for (const name of NAMES) find(`filter-${name}`).addEventListener("change", (event) => set({ [name]: event.target.value || null }));
  find("filter-clear").addEventListener("click", () => {
    set(NO_FILTER);
    find("filter-rank").focus();
  });
  onChange(show);
  show();
}
