// The latest operations, a row for each rank: pale while it waits for the last rank, full while it transfers, dashed while it has not ended.

import { colour, each, find, opColour, say } from "./elements.js";
import { passes, sizeClass } from "./filters.js";
import { onChange } from "./state.js";
import { bytes, count, plain, seconds, timeOfDay } from "./words.js";

const NAME_PX = 64;
const AXIS_PX = 22;
const LANES = 3;
// Pixels for an operation, so that waiting and transfer can be distinguished; and operations shown at any width.
const BAR_PX = 20;
const LEAST_BARS = 12;

export class Timeline {
  constructor() {
    this.place = find("timeline");
    this.canvas = this.place.querySelector("canvas");
    // The timeline shown, and the latest one received.
    this.seen = this.next = null;
    // Of a time range that has ended: its end, and its timeline, or why there is none; null: the present is shown.
    this.past = null;
    // The collective whose text is shown, as "group number/seq/op number".
    this.chosen = null;
    this.hits = [];
    this.place.addEventListener("pointermove", (event) => this.point(event));
    this.place.addEventListener("pointerleave", () => this.choose(null));
    this.place.addEventListener("blur", () => this.choose(null));
    this.place.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.place);
    onChange(() => {
      this.chosen = null;
      this.show(this.next);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // While an operation is chosen, the picture does not change.
  show(timeline) {
    this.next = timeline;
    if (this.chosen !== null) return;
    this.seen = this.past === null ? timeline : this.past.timeline;
    const ops = (this.seen?.ops ?? []).filter((op) => passes({ op }));
    const legend = ops.map((op) => ({ text: plain(op), kind: "", colour: opColour(op) }));
    if (ops.length) legend.push({ text: "waiting for the last rank", kind: "waiting", colour: "--quiet" }, { text: "not ended", kind: "open", colour: "--quiet" });
    each(find("timeline-legend"), "li", legend, (item, { text, kind, colour: name }) => {
      if (!item.firstElementChild) item.append(document.createElement("span"));
      item.className = kind;
      item.style.color = `var(${name})`;
      say(item.firstElementChild, text);
    });
    this.draw();
  }

  // Shows the latest operations of a range that ended at `to`; past: null shows the present.
  range(past) {
    if (["to", "timeline", "why"].every((key) => past?.[key] === this.past?.[key])) return;
    this.past = past;
    this.chosen = null;
    this.show(this.next);
  }

  // What passes the filters: [ranks' tracks]. The bars of groups and sizes that do not are left out.
  tracks() {
    const { seen } = this;
    const shown = (op, group, size) => passes({ op: seen.ops[op], group: seen.groups[group], size: sizeClass(size) });
    return (seen?.tracks ?? [])
      .filter(({ rank }) => passes({ rank }))
      .map(({ rank, bars, pending }) => ({
        rank,
        bars: bars.filter(([, , , op, group, , size]) => shown(op, group, size)),
        // The size of an operation that has not ended is not known here.
        pending: pending.filter(([, , op, group]) => passes({ op: seen.ops[op], group: seen.groups[group] })),
      }));
  }

  summary(ranks) {
    const { seen } = this;
    const open = this.hits.filter((hit) => hit.age !== undefined).length;
    const old = this.past === null && seen.age_s > 2 ? `; nothing has ended or begun for ${seconds(seen.age_s)}` : "";
    const until = this.past === null ? "" : ` until ${timeOfDay(this.past.to)}`;
    say(find("timeline-said"), `The latest ${count(this.hits.length, "operation")}${until} of ${count(ranks, "rank")}, in ${seconds(seen.span_s - this.begin_us / 1e6)}, ${open} not ended${old}.`);
  }

  // -- drawing -------------------------------------------------------------------------------

  draw() {
    const { seen, canvas } = this;
    const tracks = this.tracks();
    const row = Math.max(11, Math.min(46, Math.floor(300 / Math.max(1, tracks.length))));
    const width = this.place.clientWidth;
    const height = Math.max(1, tracks.length) * row + AXIS_PX;
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    canvas.style.height = `${height}px`;
    this.hits = [];
    if (!seen) say(find("timeline-said"), this.past === null ? "No operation whose time is known yet." : this.past.why);
    if (!seen || width <= NAME_PX) return;
    if (!tracks.length) return say(find("timeline-said"), "No operation here passes the filter.");
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.begin_us = begin(tracks, Math.max(LEAST_BARS, Math.floor((width - NAME_PX) / BAR_PX)));
    const span = Math.max(1, seen.span_s * 1e6 - this.begin_us);
    // Room on the right for what has not ended.
    const scale = (width - NAME_PX) / (span * (tracks.some((track) => track.pending.length) ? 1.12 : 1));
    this.axis(pen, span, scale, tracks.length * row);
    tracks.forEach((track, i) => this.track(pen, track, i * row, row, scale, width));
    if (this.chosen === null) this.summary(tracks.length);
  }

  axis(pen, span, scale, bottom) {
    pen.strokeStyle = colour("--grid");
    pen.fillStyle = colour("--quiet");
    pen.textAlign = "left";
    const step = nice((span * 110) / Math.max(1, span * scale));
    for (let at = 0; at <= span; at += step) {
      const x = NAME_PX + at * scale;
      line(pen, x, 0, x, bottom + 4);
      const text = at ? `+${seconds(at / 1e6).replace(/\.0+ s$/, " s")}` : "0";
      if (x + 3 + pen.measureText(text).width <= this.place.clientWidth) pen.fillText(text, x + 3, bottom + AXIS_PX / 2);
    }
  }

  track(pen, track, top, row, scale, width) {
    pen.fillStyle = colour("--text");
    pen.textAlign = "right";
    if (row > 12 || track.rank % 4 === 0) pen.fillText(row > 20 ? `rank ${track.rank}` : track.rank, NAME_PX - 8, top + row / 2);
    const lanes = row > 20 ? Math.min(LANES, Math.max(1, this.seen.groups.length)) : 1;
    const high = (row - 4) / lanes;
    const place = (group) => top + 2 + (group % lanes) * high;
    for (const [began, duration, wait, op, group, seq, size, part] of track.bars) {
      const start = began - this.begin_us;
      if (start + duration <= 0) continue;
      const from = Math.max(NAME_PX, NAME_PX + start * scale);
      const to = Math.max(from + 1, NAME_PX + (start + duration) * scale);
      const free = Math.min(to, Math.max(from, NAME_PX + (start + (wait ?? 0)) * scale));
      pen.fillStyle = colour(opColour(this.seen.ops[op]));
      pen.globalAlpha = 0.35;
      pen.fillRect(from, place(group), free - from, high - 1);
      pen.globalAlpha = 0.95;
      pen.fillRect(free, place(group), Math.max(1, to - free - 0.5), high - 1);
      pen.globalAlpha = 1;
      const hit = { rank: track.rank, from, to, top: place(group), bottom: place(group) + high, start, duration, wait, op, group, seq, size, part };
      this.hits.push(hit);
      if (this.chosen === name(hit)) outline(pen, hit);
    }
    for (const [began, age, op, group, seq] of track.pending) {
      const start = began - this.begin_us;
      const from = Math.max(NAME_PX, NAME_PX + start * scale);
      const hit = { rank: track.rank, from, to: width - 1, top: place(group), bottom: place(group) + high, start, age, op, group, seq };
      pen.strokeStyle = colour(opColour(this.seen.ops[op]));
      pen.setLineDash([4, 3]);
      pen.strokeRect(from + 0.5, hit.top + 0.5, Math.max(2, width - 2 - from), high - 2);
      pen.setLineDash([]);
      this.hits.push(hit);
      if (this.chosen === name(hit)) outline(pen, hit);
    }
  }

  // -- text ----------------------------------------------------------------------------------

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = this.hits.findLast((each) => x >= each.from - 1 && x <= each.to + 1 && y >= each.top && y <= each.bottom);
    this.choose(hit ? name(hit) : null);
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (!step) return;
    event.preventDefault();
    const known = [...new Set([...this.hits].sort((a, b) => a.start - b.start).map(name))];
    if (!known.length) return;
    const at = known.indexOf(this.chosen);
    this.choose(at < 0 ? known.at(step > 0 ? 0 : -1) : known[Math.min(known.length - 1, Math.max(0, at + step))]);
  }

  choose(chosen) {
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    find("timeline-said").ariaLive = chosen === null ? "off" : "polite";
    if (chosen === null) return this.show(this.next);
    this.draw();
    const parts = this.hits.filter((hit) => name(hit) === this.chosen).sort((a, b) => a.start - b.start);
    if (parts.length) say(find("timeline-said"), this.describe(parts));
  }

  // Which rank entered when, and which waited longest.
  describe(parts) {
    const [first, last] = [parts[0], parts.at(-1)];
    const size = parts.find((part) => part.size)?.size;
    const carried = this.seen.parts[parts.find((part) => part.part != null)?.part];
    let text = `${plain(this.seen.ops[first.op])} ${first.seq} of ${plain(this.seen.groups[first.group])}${carried ? `, ${plain(carried)}` : ""}${size ? `, ${bytes(size)}` : ""}: `;
    if (parts.length === 1) text += `rank ${first.rank}.`;
    else if (first.start === last.start) text += `${parts.length} ranks entered at once.`;
    else text += `rank ${first.rank} entered first, rank ${last.rank} last, ${seconds((last.start - first.start) / 1e6)} later.`;
    const open = parts.filter((part) => part.age !== undefined);
    if (open.length) text += ` Not ended on ${count(open.length, "rank")}, for ${seconds(Math.max(...open.map((part) => part.age)) / 1e6)}.`;
    const ended = parts.filter((part) => part.duration !== undefined);
    const waited = ended.filter((part) => part.wait !== null);
    if (waited.length) {
      const most = waited.reduce((a, b) => (a.wait >= b.wait ? a : b));
      text += ` Rank ${most.rank} waited ${seconds(most.wait / 1e6)} of its ${seconds(most.duration / 1e6)}; the transfer took ${seconds((most.duration - most.wait) / 1e6)}.`;
    } else if (ended.length) text += ` It took ${seconds(Math.max(...ended.map((part) => part.duration)) / 1e6)}.`;
    return text;
  }
}

// Where to begin, so that no rank has more bars than there is room for.
function begin(tracks, most) {
  return Math.max(0, ...tracks.filter((track) => track.bars.length > most).map((track) => track.bars.at(-most)[0]));
}

const name = (hit) => `${hit.group}/${hit.seq}/${hit.op}`;

function outline(pen, hit) {
  pen.strokeStyle = colour("--text");
  pen.strokeRect(hit.from - 0.5, hit.top - 0.5, hit.to - hit.from + 1, hit.bottom - hit.top);
}

function line(pen, ...[x, y, toX, toY]) {
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(toX, toY);
  pen.stroke();
}

// The next of 1, 2, 5, 10, 20, ...
function nice(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}
