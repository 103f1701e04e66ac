// The time range: buttons, fields, and what the agent has stored of it.

import { Latest, again, ask } from "./ask.js";
import { find, say } from "./elements.js";
import { LASTS, LIVE, onChange, set, state } from "./state.js";
import { dateAndTime, part, timeOfDay } from "./words.js";

// Shorter ranges would have less than two points.
const LEAST_S = 20;
const PRESENT = " The latest steps, the ranks and the operations in flight are those of the present.";

export const isLive = () => state().last === null && state().from === null;

// Zooms to a part of the plots, outwards to whole slots.
export function zoom(from, to) {
  const begin = Math.floor(from / 10) * 10;
  set({ last: null, from: begin, to: Math.max(begin + LEAST_S, Math.ceil(to / 10) * 10) });
}

export const live = () => set(LIVE);

const isPast = ({ job }) => state().from !== null || state().last === "all" || job?.state === "ended";

export class Range {
  // show({ from, to } or null, stored): `stored` is the answer of /api/v1/past, or null where none is needed or there is none yet.
  constructor(show) {
    this.show = show;
    this.moment = null;
    this.askedAt = 0;
    // Whether the latest request failed, or some nodes did not answer: then it is repeated.
    this.failed = this.partial = false;
    this.stored = null;
    // When the job began and when it was last seen, where that is needed.
    this.job = null;
    this.latest = new Latest((found) => this.found(found));
    for (const button of find("ranges").querySelectorAll("button")) {
      button.addEventListener("click", () => set({ ...LIVE, last: button.dataset.last || null }));
    }
    for (const id of ["from", "to"]) find(id).addEventListener("change", () => this.entered());
    onChange((before) => {
      if (["last", "from", "to"].some((key) => before[key] !== state()[key])) this.changed();
      if (this.moment) this.refresh();
    });
    this.marks();
  }

  // A new second.
  tick(moment) {
    this.moment = moment;
    this.refresh();
  }

  changed() {
    this.stored = this.job = null;
    this.askedAt = 0;
    this.latest.drop();
    this.marks();
  }

  refresh() {
    const { moment } = this;
    const window = this.bounds();
    this.show(window, this.stored);
    if (isLive()) say(find("range-said"), "Live. Drag over a plot to zoom; double-click a plot to return.");
    else if (!isPast(moment)) say(find("range-said"), `The last ${plainly(LASTS[state().last])} of the job, a point for each 10 s.${PRESENT}`);
    else if (moment.job && (!this.askedAt || ((this.moves() || this.failed || this.partial) && moment.at - this.askedAt >= again(this.failed, this.latest.took, this.partial)))) {
      if (!this.askedAt) say(find("range-said"), "Loading the range.");
      this.askedAt = moment.at;
      this.latest.ask(() => this.question(moment.job.job_id));
    }
  }

  // Whether the end of the range moves.
  moves() {
    return state().from === null && this.moment.job?.state !== "ended";
  }

  async question(job) {
    if (state().from === null) this.job = (await ask("jobs", {})).find((each) => each.job_id === job) ?? null;
    const window = this.bounds();
    if (window === null) throw new Error("the job is not in the history");
    return ask("past", { job, since: Math.floor(window.from), until: Math.ceil(window.to) });
  }

  // Begin and end of the range in Unix seconds; null: the present, or not known yet.
  bounds() {
    const { moment, job } = this;
    const { last, from, to } = state();
    if (from !== null) return { from, to };
    if (last === null || !moment.job || (isPast(moment) && !job)) return null;
    const end = moment.job.state === "ended" ? Math.ceil(job.last_seen_at) : moment.at;
    return { from: LASTS[last] === null ? job.started_at : end - LASTS[last], to: end };
  }

  found({ data, why }) {
    const window = this.bounds();
    this.failed = !data;
    this.partial = Boolean(data) && part(data.nodes) !== null;
    if (data) this.stored = data.data;
    say(find("range-said"), data ? said(window, data.nodes, data.data) : `The range cannot be shown: ${why}. Trying again.`);
    this.show(window, this.stored);
  }

  // -- fields --------------------------------------------------------------------------------

  marks() {
    const { last, from, to } = state();
    for (const button of find("ranges").querySelectorAll("button")) {
      button.ariaPressed = String(from === null && (button.dataset.last || null) === last);
    }
    find("from").value = local(from);
    find("to").value = local(to);
  }

  entered() {
    const [begin, end] = ["from", "to"].map((id) => (find(id).value ? new Date(find(id).value) / 1000 : null));
    const to = end ?? this.moment?.at ?? Date.now() / 1000;
    const from = begin ?? to - 300;
    if (from < to) zoom(from, to);
    else say(find("range-said"), "The range must begin before it ends.");
  }
}

function said({ from, to }, nodes, { length_s: length, busbw_length_s: busbw }) {
  const some = part(nodes) === null ? "" : ` Only ${part(nodes)} answered.`;
  const end = state().last === "all" ? "" : ` to ${timeOfDay(to)}`; // of a job that runs it moves
  return `From ${dateAndTime(from)}${end}, a point for each ${plainly(length)}${busbw > length ? ` (bus bandwidth: ${plainly(busbw)})` : ""}.${some}${PRESENT}`;
}

const plainly = (length) => (length % 3600 === 0 ? `${length / 3600} h` : length % 60 === 0 ? `${length / 60} min` : `${length} s`);

// The value of a field of local time.
function local(unix) {
  return unix === null ? "" : dateAndTime(unix).replace(" ", "T");
}
