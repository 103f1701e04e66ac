// Numbers and names as text, in the style of agent/commwatch_agent/text/units.py; "–" means not known.

export const UNKNOWN = "–";

// Shares below the first have one decimal, below the second two.
const SMALL = 0.00995, TINY = 0.000995;

const short = (value) => (value >= 99.95 ? value.toFixed(0) : Number(value.toPrecision(3)).toString());

// The part of a unit from which on a number is written in it, as three digits would round it to one.
const ONE = 0.9995;

// A number in the largest unit of which it is one or more, as rounded, else in the smallest; units: their sizes, the largest first.
function scaled(value, units) {
  const [of, unit] = units.find((each) => value >= ONE * each[0]) ?? units.at(-1);
  return `${short(value / of)} ${unit}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value === 0) return "0 s";
  if (value < ONE) return scaled(value, [[1e-3, "ms"], [1e-6, "µs"]]);
  if (value < 119.5) return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} s`;
  const whole = Math.round(value), minutes = Math.round(value / 60);
  const two = (number) => String(number).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}m${two(whole % 60)}s` : `${Math.floor(minutes / 60)}h${two(minutes % 60)}m`;
}

export function percent(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const size = Math.abs(value);
  return `${Number((100 * value).toFixed(size >= SMALL ? 0 : size >= TINY ? 1 : 2)) + 0}%`;
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return scaled(value, [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]]);
}

// Powers of two, as buffers, messages and memory have.
export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value < ONE * 1024 ? `${value.toFixed(0)} B` : scaled(value, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]);
}

export function perSecond(value) {
  return value === null || value === undefined ? UNKNOWN : `${short(value)}/s`;
}

// Time since a begin, as 1:05 or 1:02:05.
export function elapsed(value) {
  const whole = Math.max(0, Math.round(value));
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  return `${hours ? `${hours}:${two(Math.floor((whole % 3600) / 60))}` : Math.floor(whole / 60)}:${two(whole % 60)}`;
}

// Times as 2026-01-31 23:59:59, which is the Swedish format, in the time zone of the browser.
export function timeOfDay(unix) {
  return new Date(unix * 1000).toLocaleTimeString("sv");
}

export function dateAndTime(unix) {
  return new Date(unix * 1000).toLocaleString("sv");
}

// The time of a moment today, else with the date.
export function timeOrDate(unix) {
  return new Date(unix * 1000).toDateString() === new Date().toDateString() ? timeOfDay(unix) : dateAndTime(unix);
}

// With the time zone's name.
export function moment(unix) {
  const parts = new Intl.DateTimeFormat("sv", { timeZoneName: "short" }).formatToParts(unix * 1000);
  return `${dateAndTime(unix)} ${parts.find((part) => part.type === "timeZoneName").value}`;
}

// Control characters, and characters that change the writing direction, could make a name look like something else.
export function plain(name) {
  return String(name).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "\ufffd");
}

// The state of a rank as people read it.
export const stateInWords = (state) => (state === "gone" ? "died" : state);

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

// What an answer covers if some nodes did not answer, such as "1 of 2 nodes"; null: all answered.
export function part({ answered, silent }) {
  const known = answered + Object.keys(silent).length;
  return answered === known ? null : `${answered} of ${known} nodes`;
}
