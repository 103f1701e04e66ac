// Tables that can be sorted by each column. The address has the order.

import { make } from "./elements.js";
import { onChange, set, state } from "./state.js";

// What each table was last filled with, to show it in another order.
const filled = new Map();

// columns: [name, is text, what it means]; rows: { kind, cells, values, key }. The first cell names its row. A cell is a text, or
// { text, href, rank } for a link to a rank. `values` has what to sort by where that is not the text: a number, or null, which comes last.
// `key` names what the row is of, so that it keeps its focus in another order.
export function table(element, columns, rows, empty) {
  filled.set(element, [columns, rows, empty]);
  if (!element.tHead) heads(element, columns);
  mark(element, columns);
  const shown = rows.length ? sorted(element, columns, rows) : [{ kind: "quiet", cells: [empty] }];
  arrange(element.tBodies[0], shown.map(({ key }, i) => String(key ?? i)));
  shown.forEach((row, i) => fill(element.tBodies[0].rows[i], row, columns, !rows.length));
}

// Makes one row per key, in this order; existing rows are used again. A row that is moved loses the focus, and gets it back.
function arrange(body, keys) {
  const focused = document.activeElement;
  const known = new Map([...body.rows].map((line) => [line.dataset.key, line]));
  keys.forEach((key, i) => {
    const line = known.get(key) ?? make("tr");
    line.dataset.key = key;
    if (body.rows[i] !== line) body.insertBefore(line, body.rows[i] ?? null);
  });
  while (body.rows.length > keys.length) body.lastElementChild.remove();
  if (body.contains(focused) && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

function heads(element, columns) {
  const line = element.createTHead().insertRow();
  for (const [name, text, means] of columns) {
    const head = make("th", undefined, text ? "text" : "");
    head.scope = "col";
    const button = make("button", name);
    button.type = "button";
    if (means) button.title = means;
    button.addEventListener("click", () => set({ [key(element)]: following(element, name, text) }, { replace: true }));
    head.append(button);
    line.append(head);
  }
  element.createTBody();
}

const key = (element) => `sort-${element.id}`;

// Numbers begin with the largest, texts with the first; then the other order; then that of the page again.
function following(element, name, text) {
  const orders = text ? [name, `-${name}`, null] : [`-${name}`, name, null];
  return orders[(orders.indexOf(state()[key(element)]) + 1) % 3];
}

function chosen(element, columns) {
  const order = state()[key(element)];
  const name = order?.replace(/^-/, "");
  const at = order ? columns.findIndex((column) => column[0] === name) : -1;
  return { at, down: order?.startsWith("-") };
}

function mark(element, columns) {
  const { at, down } = chosen(element, columns);
  [...element.tHead.rows[0].cells].forEach((head, i) => {
    const order = i === at ? (down ? "descending" : "ascending") : null;
    if (head.ariaSort !== order) head.ariaSort = order;
  });
}

function sorted(element, columns, rows) {
  const { at, down } = chosen(element, columns);
  if (at < 0) return rows;
  const value = (row) => row.values?.[at] ?? (columns[at][1] ? row.cells[at] : null);
  return rows
    .map((row) => [value(row), row])
    .sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
      return down ? -order : order;
    })
    .map(([, row]) => row);
}

function fill(line, row, columns, spans) {
  if (line.className !== (row.kind ?? "")) line.className = row.kind ?? "";
  while (line.cells.length > row.cells.length) line.lastElementChild.remove();
  row.cells.forEach((content, i) => {
    let cell = line.cells[i];
    if (!cell) {
      cell = make(i ? "td" : "th");
      if (!i) cell.scope = "row";
      line.append(cell);
    }
    cell.colSpan = spans ? columns.length : 1;
    const kind = columns[i][1] || spans ? "text" : "";
    if (cell.className !== kind) cell.className = kind;
    if (content.href) return link(cell, content);
    if (cell.textContent !== content) {
      cell.textContent = content;
      cell.title = kind && content.length > 24 ? content : "";
    }
  });
}

// An existing link is used again, so that it keeps the focus.
function link(cell, { text, href, rank }) {
  let there = cell.firstElementChild;
  if (!there) cell.replaceChildren((there = make("a")));
  if (there.textContent !== text) there.textContent = text;
  if (there.getAttribute("href") !== href) there.setAttribute("href", href);
  there.dataset.rank = rank;
  there.ariaLabel = `Rank ${rank}`;
}

onChange((before) => {
  for (const [element, [columns, rows, empty]] of filled) {
    if (before[key(element)] !== state()[key(element)]) table(element, columns, rows, empty);
  }
});
