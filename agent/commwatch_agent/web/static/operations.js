// The table of operations: of the last minute, from the agent's events, or of a time range or with filters, from its history.

import { Latest, again, ask } from "./ask.js";
import { find, say } from "./elements.js";
import { filtered, passes } from "./filters.js";
import { isLive } from "./range.js";
import { onChange, state } from "./state.js";
import { table } from "./tables.js";
import { UNKNOWN, part, perSecond, percent, plain, rate, seconds, timeOfDay } from "./words.js";

const LIVE_S = 60;

const COLUMNS = [
  ["group", true], ["op", true], ["group size", false, "number of ranks in the group"], ["count", false, "per second and rank"], ["p50"], ["p99"], ["algbw"], ["busbw", false, "over the whole duration, waiting for late ranks included"],
  ["time", false, "share of the ranks' time"], ["waits", false, "share of the ranks' time spent waiting in it"],
];

// The events have sums over all ranks and sizes.
const fromEvents = () => isLive() && !filtered("rank", "size");

const NOT_KNOWN = "not known yet";
const none = (unfiltered) => (filtered("rank", "group", "op", "size") ? "no operation passes the filter" : unfiltered);

export class OperationsTable {
  constructor() {
    this.latest = new Latest((found) => this.found(found));
    this.event = { covered_s: 0, rows: [] };
    this.askedAt = null;
    // Whether the latest request failed, or some nodes did not answer: then it is repeated.
    this.failed = this.partial = false;
    onChange((before) => {
      const changed = ["last", "from", "to", "rank", "group", "op", "size"].some((key) => before[key] !== state()[key]);
      if (changed) this.changed();
    });
    this.fill([], 0, NOT_KNOWN);
    this.hear(this.event);
  }

  // The operations of the last minute.
  hear(event) {
    this.event = event;
    if (!fromEvents()) return;
    say(find("operations-title"), "Operations of the last minute");
    say(find("operations-said"), "");
    this.fill(event.rows.filter(({ by }) => passes(by)), event.covered_s, none("no operation has ended in the last minute"));
  }

  changed() {
    this.latest.drop();
    this.askedAt = null;
    if (fromEvents()) return this.hear(this.event);
    say(find("operations-title"), "Operations"); // not of the previous selection
    this.fill([], 0, NOT_KNOWN);
  }

  // A new second of a job; `window`: the time range, null: the present.
  tick({ at, job }, window) {
    if (fromEvents() || (!isLive() && window === null)) return;
    const fixed = state().from !== null || (job.state === "ended" && window !== null);
    if (this.askedAt !== null && ((fixed && !this.failed && !this.partial) || at - this.askedAt < again(this.failed, this.latest.took, this.partial))) return;
    if (this.askedAt === null) say(find("operations-said"), "Loading.");
    this.askedAt = at;
    const { from, to } = window ?? { from: at - LIVE_S, to: at };
    const { rank, group, op, size } = state();
    const wanted = { job: job.job_id, scope: "job", by: "group,op", since: Math.floor(from), until: Math.ceil(to), rank, group, op, size };
    this.latest.ask(() => ask("summary", wanted));
  }

  found({ data: answer, why }) {
    this.failed = Boolean(why);
    this.partial = !why && part(answer.nodes) !== null;
    if (why) return say(find("operations-said"), `The operations cannot be shown: ${why}. Trying again.`);
    const { since, until, rows } = answer.data;
    say(find("operations-title"), since === null ? "Operations" : `Operations from ${timeOfDay(since)} to ${timeOfDay(until)}`);
    say(find("operations-said"), this.partial ? `Of ${part(answer.nodes)}: the others did not answer.` : "");
    this.fill(rows, until - since, none("no operation has ended in this range"));
  }

  fill(found, covered, empty) {
    const rows = found.map((row) => {
      const time = row.ranks * covered;
      const waited = row.wait_s ?? row.p2p_wait_s;
      const share = row.p50_s === null ? null : row.seconds / time;
      return {
        cells: [
          plain(row.by.group), plain(row.by.op), row.group_size === null ? UNKNOWN : String(row.group_size), perSecond(row.count / time), seconds(row.p50_s), seconds(row.p99_s),
          rate(row.algbw), rate(row.busbw), percent(share), waited === null ? UNKNOWN : percent(waited / time),
        ],
        values: [, , row.group_size, row.count / time, row.p50_s, row.p99_s, row.algbw, row.busbw, share, waited === null ? null : waited / time],
      };
    });
    table(find("operations"), COLUMNS, rows, empty);
  }
}
