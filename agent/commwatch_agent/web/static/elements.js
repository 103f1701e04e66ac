// Writes text into the page: always as text, never as HTML; unchanged elements are not touched.

export const find = (id) => document.getElementById(id);

export function say(element, text, kind) {
  if (element.textContent !== text) element.textContent = text;
  if (kind !== undefined && element.dataset.kind !== kind) {
    element.classList.remove("good", "warn", "bad", "quiet");
    if (kind) element.classList.add(kind);
    element.dataset.kind = kind;
  }
}

export function make(name, text, kind) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

// With the commands that are between backticks.
export function makeWithCode(name, text) {
  const element = make(name);
  element.append(...text.split("`").map((part, i) => (i % 2 ? make("code", part) : part)));
  return element;
}

// Makes one child per value; existing children are used again, so that focus and selection stay.
export function each(parent, name, values, show) {
  while (parent.children.length > values.length) parent.lastElementChild.remove();
  values.forEach((value, i) => show(parent.children[i] ?? parent.appendChild(document.createElement(name)), value));
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Each operation has one colour, wherever it is drawn.
const OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier"];
export function opColour(op) {
  const place = OPS.indexOf(op);
  return `--c${place >= 0 ? place : (op.length + op.charCodeAt(0)) % 8}`;
}
