// One rank: what it does, its latest steps and operations, its GPU, its node and its NCCL messages.

import { ask, pause } from "./ask.js";
import { each, find, make, say } from "./elements.js";
import { onChange, set, state } from "./state.js";
import { table } from "./tables.js";
import { UNKNOWN, bytes, part, percent, perSecond, plain, rate, seconds, stateInWords, timeOfDay } from "./words.js";

// Its requests cost the agent more than the events of the page do.
const AGAIN_S = 15;
const LIVE_S = 60;
const MOST_STEPS = 20;
const MOST_MESSAGES = 1000;

const FLIGHT = [["op", true], ["group", true], ["number"], ["size", false, "of the message"], ["for"], ["usually"], ["thread waits", false, "for how long a thread, or the GPU, waits for it"]];
const STEPS = [["step"], ["ended"], ["time"], ["comm", false, "share of the step"], ["exposed", false, "share of the step not hidden behind compute"], ["messages", false, "time in which a thread waited for sends and receives"], ["remark", true]];
const OPERATIONS = [["group", true], ["op", true], ["count"], ["p50"], ["p99"], ["busbw", false, "over the whole duration, waiting for late ranks included"], ["time", false, "share of the rank's time"], ["waits", false, "share of the rank's time spent waiting in it"]];

export class RankPage {
  constructor() {
    this.askedAt = null;
    this.number = 0;
    // Of the time range: when it was asked for, how long that took, the rank's steps and operations in it, whether one of them did not
    // come, and the nodes that answered, null: all; null: not asked yet.
    this.stored = null;
    find("rank-close").addEventListener("click", close);
    find("ranks").addEventListener("click", (event) => {
      const link = event.target.closest("a");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      set({ open: link.dataset.rank });
    });
    onChange((before) => {
      if (["open", "last", "from", "to"].some((key) => before[key] !== state()[key])) this.changed(before.open !== state().open);
    });
    clear(state().open);
    this.changed(false);
  }

  changed(moves) {
    const { open } = state();
    this.askedAt = this.stored = null;
    this.number += 1;
    find("rank").hidden = open === null;
    if (open === null || !moves) return;
    clear(open);
    find("rank-title").focus();
  }

  // A new second of a job; `window`: the time range, null: the present; `moves`: whether its end moves.
  tick({ at, job }, window, moves) {
    const { open } = state();
    if (open === null || (this.askedAt !== null && at - this.askedAt < AGAIN_S)) return;
    if (this.askedAt === null) clear(open);
    this.askedAt = at;
    const { stored } = this;
    const old = stored === null || stored.missing || ((moves || stored.partial !== null) && at - stored.at >= pause(AGAIN_S, stored.took, stored.partial !== null));
    this.load(job.job_id, open, at, old ? (window ?? { from: at - LIVE_S, to: at }) : null, moves);
  }

  // `window`: what to ask for of the time range; null: what is known of it is new enough.
  async load(job, rank, at, window, moves) {
    const number = ++this.number;
    const here = await known(ask("ranks", { job }));
    const own = here?.find((each) => each.rank === rank) ?? null;
    const found = await Promise.all([
      own ?? known(ask("ranks", { job, scope: "job" })).then((all) => all?.data.find((each) => each.rank === rank) ?? null),
      window === null ? this.stored : inRange(job, rank, at, window),
      ...(own ? [known(ask("gpus", { job })), known(ask("host", { job })), known(ask("nccl/messages", { job, limit: MOST_MESSAGES }))] : [null, null, null]),
    ]);
    if (number !== this.number) return;
    const [view, stored, gpus, host, messages] = found;
    this.stored = stored;
    const gpu = gpus?.gpus.find(({ ranks }) => ranks.some((on) => on.rank === rank)) ?? null;
    say(find("rank-said"), view === null ? "The agent does not know this rank." : `As of ${timeOfDay(at)}, updated every ${AGAIN_S} s.${stored.at < at && moves ? ` Steps and operations as of ${timeOfDay(stored.at)}.` : ""}${stored.partial ? ` Only ${stored.partial} answered.` : ""}${own ? "" : elsewhere(view)}`);
    showFacts(view, gpu, host);
    showFlight(view);
    showSteps(ofAll(stored.steps));
    showOperations(ofAll(stored.summary));
    showMessages(messages?.filter((message) => message.rank === rank) ?? null);
  }
}

// What does not come is null: the rest is shown all the same.
const known = (question) => question.catch(() => null);

// What an answer has of the rank, which may be nothing; null: not known, as the rank's node may not have answered.
function ofAll(answer) {
  const found = answer?.data ?? null;
  return found === null || ((found.rows ?? found).length === 0 && part(answer.nodes) !== null) ? null : found;
}

async function inRange(job, rank, at, { from, to }) {
  const window = { job, rank, scope: "job", since: Math.floor(from), until: Math.ceil(to) };
  const began = performance.now();
  const [steps, summary] = await Promise.all([known(ask("steps", { ...window, limit: MOST_STEPS })), known(ask("summary", { ...window, by: "group,op" }))]);
  const partial = [steps, summary].map((answer) => answer && part(answer.nodes)).find(Boolean) ?? null;
  return { at, took: (performance.now() - began) / 1000, steps, summary, missing: steps === null || summary === null, partial };
}

export function close() {
  const { open } = state();
  set({ open: null });
  find("ranks").querySelector(`a[data-rank="${open}"]`)?.focus();
}

function clear(rank) {
  say(find("rank-title"), `Rank ${rank}`);
  say(find("rank-said"), "Loading.");
  find("rank-facts").replaceChildren();
  showFlight({ in_flight: [] });
  showSteps([]);
  showOperations({ rows: [] });
  showMessages([]);
}

const elsewhere = ({ host }) => ` This rank is on ${plain(host)}: its GPU, its node and its NCCL messages are on the page of that node's agent.`;

function showFacts(view, gpu, host) {
  const facts = view === null ? [] : [...ofProcess(view), ...ofGpu(view, gpu), ...ofNode(host)];
  each(find("rank-facts"), "div", facts, (place, [name, text]) => {
    if (!place.firstChild) place.append(make("dt"), make("dd"));
    say(place.firstChild, name);
    say(place.lastChild, text);
  });
}

function ofProcess(view) {
  const process = view.process && view.process !== view.state ? ` (${view.process})` : "";
  return [
    ["State", `${stateInWords(view.state)}${process}${view.raised ? `, raised ${plain(view.raised)}` : ""}`],
    ["Process", `${view.pid} on ${plain(view.host)}`],
    ["Last heartbeat", view.heartbeat_age_s === null ? UNKNOWN : `${seconds(Math.max(0, view.heartbeat_age_s))} ago`],
    ["Recorded", `${view.records} records, ${view.lost} lost, mode ${view.probe_mode ?? UNKNOWN}`],
  ];
}

function ofGpu(view, gpu) {
  if (gpu === null) return [["GPU", view.gpu === null ? UNKNOWN : String(view.gpu)]];
  const { card, measured: m } = gpu.gpu;
  const parts = [`${card.index}: ${percent(m.utilization)} busy`];
  if (m.memory_used_bytes !== null) parts.push(`${bytes(m.memory_used_bytes)} of ${bytes(m.memory_total_bytes)}`);
  if (m.temperature_celsius !== null) parts.push(`${m.temperature_celsius.toFixed(0)} °C`);
  if (m.power_watts !== null) parts.push(`${m.power_watts.toFixed(0)} W`);
  return [["GPU", parts.join(", ")], ["GPU errors", gpu.xids.length ? gpu.xids.map((xid) => `Xid ${xid.xid}, ${plain(xid.title)}`).join("; ") : "no Xid"]];
}

function ofNode(host) {
  if (host === null) return [];
  const { cpu, memory, complaints, pressure } = host;
  const idle = cpu?.shares.idle;
  const facts = [];
  if (cpu) facts.push(["CPU", `${cpu.cores} cores${idle === undefined ? "" : `, ${percent(1 - idle)} busy`}${pressure.cpu === undefined ? "" : `, ${percent(pressure.cpu)} of the time a task waited`}`]);
  if (memory) facts.push(["Memory", `${bytes(memory.available_bytes)} of ${bytes(memory.total_bytes)} available`]);
  facts.push(["Network", complaints.length ? complaints.map(({ device, says }) => `${plain(device)}: ${plain(says)}`).join("; ") : "no problem found"]);
  return facts;
}

function showFlight(view) {
  const rows = (view?.in_flight ?? []).map((op) => ({
    cells: [plain(op.op), plain(op.group), String(op.seq), bytes(op.size_bytes), seconds(op.age_s), seconds(op.usual_s), seconds(op.waited_s)],
    values: [, , op.seq, op.size_bytes, op.age_s, op.usual_s, op.waited_s],
  }));
  table(find("rank-flight"), FLIGHT, rows, "nothing right now");
}

function showSteps(steps) {
  const rows = (steps ?? []).map((step) => ({
    kind: step.long ? "warn" : "",
    cells: [String(step.seq), timeOfDay(step.end_at), seconds(step.duration_s), percent(step.comm_share), percent(step.exposed_share), seconds(step.p2p_wait_s), step.long ? "far longer than its neighbours" : ""],
    values: [step.seq, step.end_at, step.duration_s, step.comm_share, step.exposed_share, step.p2p_wait_s],
  }));
  table(find("rank-steps"), STEPS, rows, steps === null ? "not known" : "no step has ended in the time range");
}

function showOperations(summary) {
  const covered = (summary?.until ?? 0) - (summary?.since ?? 0);
  const rows = (summary?.rows ?? []).map((row) => {
    const waited = row.wait_s ?? row.p2p_wait_s;
    const share = row.p50_s === null ? null : row.seconds / covered;
    const waits = waited === null ? null : waited / covered;
    return {
      cells: [plain(row.by.group), plain(row.by.op), perSecond(row.count / covered), seconds(row.p50_s), seconds(row.p99_s), rate(row.busbw), percent(share), percent(waits)],
      values: [, , row.count, row.p50_s, row.p99_s, row.busbw, share, waits],
    };
  });
  table(find("rank-operations"), OPERATIONS, rows, summary === null ? "not known" : "no operation has ended in the time range");
}

function showMessages(messages) {
  const found = messages ?? [];
  each(find("rank-messages"), "li", found, (item, { at, text }) => say(item, `${timeOfDay(at)} ${plain(text)}`));
  say(find("rank-messages-said"), found.length ? "" : messages === null ? "Not known here." : "None.");
}
