// Shares of the steps against the 30% line, and bus bandwidth by operation: of the last hour, one point each ten seconds, or of a time range.

import { colour, find, opColour, say } from "./elements.js";
import { filtered, passes } from "./filters.js";
import { live, zoom } from "./range.js";
import { onChange } from "./state.js";
import { elapsed, percent, plain, rate, timeOfDay } from "./words.js";

const LIMIT = 0.3;
const HOUR_S = 3600;
const SLOT_S = 10;
// Values of a running job that are older are not called the latest.
const OLD_S = 30;

export class Plots {
  constructor() {
    this.slots = new Map();
    // The time range, and what is stored of it; null: the last hour.
    this.window = this.stored = null;
    // The present, while it is the end of what is shown and the job runs, else null; and whether points have become older than an hour.
    this.now = null;
    // When the job began, if it has ended: then times are counted from there.
    this.began = null;
    this.dropped = false;
    this.plots = {};
    this.drawn = {};
    // Incidents, whose time is shaded.
    this.incidents = [];
    onChange(() => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
    new ResizeObserver(() => this.fit()).observe(find("shares"));
  }

  // Drop all points, and begin with the past of a job.
  begin(slots) {
    this.slots = new Map();
    this.dropped = false;
    this.add(slots);
    this.draw();
  }

  add(slots) {
    for (const slot of slots) this.slots.set(slot.at, slot);
    const latest = Math.max(this.now ?? 0, ...this.slots.keys());
    for (const at of this.slots.keys()) if (at < latest - HOUR_S) this.dropped = this.slots.delete(at);
  }

  // Before the points of the same moment, with which the plots are drawn.
  mark(incidents) {
    this.incidents = incidents.filter(({ state, severity }) => state !== "pending" && severity !== "info");
  }

  range(window, stored, now, began = null) {
    this.window = window;
    this.stored = stored;
    this.now = now;
    this.began = began;
    this.draw();
  }

  // The slots in the range, and the lengths of those with shares and of those with bandwidths.
  shown() {
    const { window, stored } = this;
    const own = [...this.slots.values()].filter(({ at }) => window === null || (at > window.from && at - SLOT_S < window.to));
    // What the page has received itself may be later than what is stored, but only in slots of ten seconds.
    const slots = stored === null ? own : stored.busbw_length_s > SLOT_S ? stored.slots : [...new Map([...stored.slots, ...own].map((slot) => [slot.at, slot])).values()];
    return [slots.sort((a, b) => a.at - b.at), stored?.length_s ?? SLOT_S, stored?.busbw_length_s ?? SLOT_S];
  }

  draw() {
    const [slots, length, busbwLength] = this.shown();
    const ops = [...new Set(slots.flatMap((slot) => Object.keys(slot.busbw)))].filter((op) => passes({ op })).sort();
    const withShares = slots.filter((slot) => slot.comm !== null || length === busbwLength);
    const withRates = slots.filter((slot) => Object.keys(slot.busbw).length || length === busbwLength);
    const parts = [(s) => s.comm, transfer, (s) => s.waiting, (s) => s.exposed];
    this.show("shares", ["communication", "transfer", "waiting", "exposed"], ["--c1", "--c2", "--c0", "--c3"], columns(withShares, parts, length));
    this.show("busbw", ops, ops.map(opColour), columns(withRates, ops.map((op) => (s) => s.busbw[op] ?? null), busbwLength));
    this.tell(slots, length);
  }

  tell(slots, length) {
    const last = slots.findLast((slot) => slot.comm !== null);
    const first = slots.length ? this.began === null ? `Since ${timeOfDay(slots[0].at - length)}. ` : `Times are since the job began, at ${timeOfDay(this.began)}. ` : "";
    const exposed = last && last.exposed !== null ? `, exposed ${percent(last.exposed)}` : "";
    const split = slots.findLast((slot) => slot.waiting !== null);
    const parts = split ? ` Latest known parts: transfer ${percent(transfer(split))}, waiting ${percent(split.waiting)}.` : last ? " Its parts, transfer and waiting, are not known." : "";
    const none = this.window !== null ? "in this range" : this.dropped ? "in the last hour" : "yet";
    const all = filtered("rank", "group", "op", "size") ? " Of all operations of all ranks: shares cannot be filtered." : "";
    say(find("shares-said"), last ? `${first}${this.when(last)}: communication ${percent(last.comm)}${exposed}.${parts} Dashed: the 30% line.${this.incidents.length ? " Shaded: incidents." : ""}${all}` : `No share is known ${none}.`);
    const measured = slots.findLast((slot) => Object.keys(slot.busbw).length);
    const said = Object.entries(measured?.busbw ?? {}).filter(([op]) => passes({ op })).map(([op, value]) => `${plain(op)} ${rate(value)}`);
    const every = filtered("rank", "group", "size") ? " Of all ranks, groups and sizes: bandwidth is filtered by operation only." : "";
    say(find("busbw-said"), said.length ? `${this.when(measured)}: ${said.join(", ")}.${every}` : `No operation whose bandwidth is known ${none}.`);
  }

  // How to call the latest slot that has data: nothing may have been measured for long.
  when({ at }) {
    return this.now !== null && this.now - at > OLD_S ? `At ${timeOfDay(at)}` : "Latest";
  }

  // Begin and end of the axis, where the points are from `from` to `to`; null: there are none.
  extent(from, to) {
    const { window, now, began } = this;
    if (window !== null) return [window.from, window.to];
    if (began !== null) return [began, Math.max(to ?? 0, began + 1)];
    const end = Math.max(to ?? 60, now ?? 60);
    return [Math.min(from ?? end, end - 60), end];
  }

  show(id, names, colours, data) {
    const key = [this.began, ...names].join("\n");
    if (this.drawn[id] !== key) {
      this.plots[id]?.destroy();
      this.plots[id] = names.length ? plot(find(id), id, names, colours, data, this) : null;
      this.drawn[id] = key;
    } else this.plots[id]?.setData(data);
  }

  fit() {
    for (const [id, plot] of Object.entries(this.plots)) plot?.setSize(size(find(id)));
  }

  rebuild() {
    this.drawn = {};
    this.draw();
  }
}

// uPlot's data: x, then one array per series; null where nothing was measured.
function columns(slots, series, length) {
  const data = [[], ...series.map(() => [])];
  slots.forEach((slot, i) => {
    if (i && slot.at - slots[i - 1].at > 1.5 * length) {
      data[0].push(slots[i - 1].at + length);
      series.forEach((_, k) => data[k + 1].push(null));
    }
    data[0].push(slot.at);
    series.forEach((of, k) => data[k + 1].push(of(slot)));
  });
  // uPlot gives a single point an axis of 1000 days, whatever its range is to be.
  if (data[0].length === 1) data.forEach((column, k) => column.unshift(k ? null : column[0] - length));
  return data;
}

// Marks of the axis at round times since the job began.
const marksFrom = (began) => (_, __, from, to, step) => {
  const first = Math.ceil((from - began) / step);
  return Array.from({ length: Math.floor((to - began) / step) - first + 1 }, (___, i) => began + (first + i) * step);
};

const size = (place) => ({ width: place.clientWidth, height: 200 });

function plot(place, id, names, colours, data, plots) {
  const share = id === "shares";
  const words = share ? percent : rate;
  const { began } = plots;
  const clock = [[3600, "{HH}:{mm}"], [60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"]].map(([step, form]) => [step, form, null, null, null, null, null, null, 1]);
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 } };
  const range = (_, __, most) => (share ? [0, Math.min(1, Math.max(0.4, (most ?? 0) * 1.15))] : [0, (most || 1) * 1.15]);
  const options = {
    ...size(place),
    padding: [null, 30, null, null], // for the last label of the axis
    cursor: { drag: { x: true, y: false, setScale: false, dist: 5 }, bind: { dblclick: () => live } },
    legend: { live: true },
    scales: { x: { range: (_, from, to) => plots.extent(from, to) }, y: { range } },
    axes: [
      began === null ? { ...axis, values: clock } : { ...axis, splits: marksFrom(began), values: (_, marks) => marks.map((at) => elapsed(at - began)) },
      { ...axis, size: 74, values: (_, marks) => marks.map(words) },
    ],
    series: [
      { value: (_, at) => (at === null ? "–" : began === null ? timeOfDay(at) : elapsed(at - began)) },
      ...names.map((name, i) => ({ label: plain(name), stroke: colour(colours[i]), width: 2, value: (_, value) => words(value) })),
    ],
    hooks: { drawClear: [(u) => shade(u, plots.incidents)], draw: share ? [limitLine] : [], setSelect: [selected], setLegend: [pointed] },
  };
  const made = new uPlot(options, data, place);
  made.ctx.canvas.ariaHidden = "true"; // the text below it has the values
  return made;
}

// Without a pointer over it, the legend has no values.
const pointed = (u) => u.root.classList.toggle("pointed", u.cursor.idx !== null && u.cursor.idx !== undefined);

const transfer = (slot) => (slot.waiting === null ? null : slot.comm - slot.waiting);

function selected(u) {
  const { left, width } = u.select;
  if (!width) return;
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
}

// The times of incidents, behind the lines.
function shade(u, incidents) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.globalAlpha = 0.15;
  for (const { began_at: began, last_at: last, ended_at: ended, severity } of incidents) {
    const [from, to] = [began, ended ?? last].map((at) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, u.valToPos(at, "x", true))));
    ctx.fillStyle = colour(severity === "critical" ? "--bad" : "--warn");
    if (to > bbox.left && from < bbox.left + bbox.width) ctx.fillRect(from, bbox.top, Math.max(2, to - from), bbox.height);
  }
  ctx.restore();
}

function limitLine(u) {
  const y = u.valToPos(LIMIT, "y", true);
  const { ctx } = u;
  ctx.save();
  ctx.strokeStyle = colour("--bad");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(u.bbox.left, y);
  ctx.lineTo(u.bbox.left + u.bbox.width, y);
  ctx.stroke();
  ctx.restore();
}
