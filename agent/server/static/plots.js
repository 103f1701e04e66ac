// The last hour: shares of the steps against the 30 % line, and bus bandwidth by operation. One point each ten seconds.

import { colour, find, opColour, say } from "./elements.js";
import { percent, plain, rate, timeOfDay } from "./words.js";

const LIMIT = 0.3;
const HOUR_S = 3600;
const SLOT_S = 10;

export class Plots {
  constructor() {
    this.slots = new Map();
    this.plots = {};
    this.drawn = {};
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
    new ResizeObserver(() => this.fit()).observe(find("shares"));
  }

  // Drop all points, and begin with the past of a job.
  begin(slots) {
    this.slots = new Map();
    this.add(slots);
  }

  add(slots) {
    for (const slot of slots) this.slots.set(slot.at, slot);
    const latest = Math.max(...this.slots.keys());
    for (const at of this.slots.keys()) if (at < latest - HOUR_S) this.slots.delete(at);
    this.draw();
  }

  draw() {
    const slots = [...this.slots.values()].sort((a, b) => a.at - b.at);
    const ops = [...new Set(slots.flatMap((slot) => Object.keys(slot.busbw)))].sort();
    this.show("shares", ["communication", "exposed"], ["--c1", "--c3"], columns(slots, [(s) => s.comm, (s) => s.exposed]));
    this.show("busbw", ops, ops.map(opColour), columns(slots, ops.map((op) => (s) => s.busbw[op] ?? null)));
    const last = slots.findLast((slot) => slot.comm !== null);
    const first = slots.length ? `Since ${timeOfDay(slots[0].at - SLOT_S)}. ` : "";
    const exposed = last && last.exposed !== null ? `, exposed ${percent(last.exposed)}` : "";
    say(find("shares-said"), last ? `${first}Latest: communication ${percent(last.comm)}${exposed}. Dashed: the 30 % line.` : "No share is known yet.");
    const rates = slots.findLast((slot) => Object.keys(slot.busbw).length)?.busbw ?? {};
    const said = Object.entries(rates).map(([op, value]) => `${plain(op)} ${rate(value)}`);
    say(find("busbw-said"), said.length ? `Latest: ${said.join(", ")}.` : "No operation whose bandwidth is known yet.");
  }

  show(id, names, colours, data) {
    const key = names.join("\n");
    if (this.drawn[id] !== key) {
      this.plots[id]?.destroy();
      this.plots[id] = names.length ? plot(find(id), id, names, colours, data) : null;
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
function columns(slots, series) {
  const data = [[], ...series.map(() => [])];
  slots.forEach((slot, i) => {
    if (i && slot.at - slots[i - 1].at > 1.5 * SLOT_S) {
      data[0].push(slots[i - 1].at + SLOT_S);
      series.forEach((_, k) => data[k + 1].push(null));
    }
    data[0].push(slot.at);
    series.forEach((of, k) => data[k + 1].push(of(slot)));
  });
  return data;
}

const size = (place) => ({ width: place.clientWidth, height: 200 });

function plot(place, id, names, colours, data) {
  const share = id === "shares";
  const words = share ? percent : rate;
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 } };
  const range = (_, __, most) => (share ? [0, Math.min(1, Math.max(0.4, (most ?? 0) * 1.15))] : [0, (most || 1) * 1.15]);
  const options = {
    ...size(place),
    padding: [null, 30, null, null], // for the last label of the axis
    cursor: { drag: { x: false, y: false } },
    legend: { live: true },
    scales: { x: { range: (_, from, to) => (to === null ? [0, 60] : [Math.min(from, to - 60), to]) }, y: { range } },
    axes: [
      { ...axis, values: [[3600, "{HH}:{mm}"], [60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"]].map(([step, form]) => [step, form, null, null, null, null, null, null, 1]) },
      { ...axis, size: 74, values: (_, marks) => marks.map(words) },
    ],
    series: [
      { value: (_, at) => (at === null ? "–" : timeOfDay(at)) },
      ...names.map((name, i) => ({ label: plain(name), stroke: colour(colours[i]), width: 2, value: (_, value) => words(value) })),
    ],
    hooks: share ? { draw: [limitLine] } : {},
  };
  const made = new uPlot(options, data, place);
  made.ctx.canvas.ariaHidden = "true"; // the text below it has the values
  return made;
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
