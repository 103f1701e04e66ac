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

// Makes one child per value; existing children are used again, so that focus and selection stay.
export function each(parent, name, values, show) {
  while (parent.children.length > values.length) parent.lastElementChild.remove();
  values.forEach((value, i) => show(parent.children[i] ?? parent.appendChild(document.createElement(name)), value));
}

// columns: [name, is text, what it means]; rows: { kind, cells }. The first cell names its row.
export function table(element, columns, rows, empty) {
  if (!element.tHead) {
    const line = element.createTHead().insertRow();
    for (const [name, text, means] of columns) {
      const head = make("th", name, text ? "text" : "");
      head.scope = "col";
      if (means) head.title = means;
      line.append(head);
    }
    element.createTBody();
  }
  const body = element.tBodies[0];
  const shown = rows.length ? rows : [{ kind: "quiet", cells: [empty] }];
  each(body, "tr", shown, (line, row) => {
    if (line.className !== (row.kind ?? "")) line.className = row.kind ?? "";
    const spans = !rows.length;
    while (line.cells.length > row.cells.length) line.lastElementChild.remove();
    row.cells.forEach((text, i) => {
      let cell = line.cells[i];
      if (!cell) {
        cell = make(i ? "td" : "th");
        if (!i) cell.scope = "row";
        line.append(cell);
      }
      cell.colSpan = spans ? columns.length : 1;
      const kind = columns[i][1] || spans ? "text" : "";
      if (cell.className !== kind) cell.className = kind;
      if (cell.textContent !== text) {
        cell.textContent = text;
        cell.title = kind && text.length > 24 ? text : "";
      }
    });
  });
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
