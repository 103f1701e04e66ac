// Shows the state of a job in words, numbers and tables.

import { each, find, make, say } from "./elements.js";
import { filtered, passes, sizeClass } from "./filters.js";
import { address } from "./state.js";
import { table } from "./tables.js";
import { UNKNOWN, bytes, percent, perSecond, plain, rate, seconds } from "./words.js";

const LIMIT = 0.3;
// Exposed communication below this share is not mentioned (as in commwatch's advice).
const WORTH = 0.1;
const BAD = new Set(["hang", "desync", "corruption", "critical", "error"]);

const kindOf = (name) => (BAD.has(name) ? "bad" : name === "info" ? "" : "warn");

export function showJob({ job, alerts, trouble, nodes }) {
  wrong(job, alerts, trouble, nodes);
  tiles(job);
  ranks(job);
  inFlight(job);
}

function wrong(job, alerts, trouble, nodes) {
  const said = trouble ? [{ head: "The agent", text: trouble, kind: "bad" }] : [];
  for (const [url, why] of Object.entries(nodes.silent)) {
    said.push({ head: `No answer from ${url}`, text: `(${why}): the ranks of its node are missing below.`, kind: "bad" });
  }
  for (const verdict of job.verdicts) {
    const whom = verdict.ranks.length ? `, ${verdict.ranks.length > 1 ? "ranks" : "rank"} ${spans(verdict.ranks)}` : "";
    const says = verdict.says.replace(`${verdict.kind}: `, "");
    said.push({ head: `${verdict.kind.toUpperCase()}${whom}`, text: says, kind: kindOf(verdict.kind) });
  }
  if (job.sheds) said.push({ head: "The probe", text: job.sheds, kind: "warn" });
  for (const alert of alerts.filter((alert) => alert.state === "firing")) {
    const links = [[`/runbook#${alert.name.toLowerCase()}`, "what to do"]];
    if (alert.annotations.evidence_url) links.push([`/api/v1/alerts/${encodeURIComponent(alert.id)}/evidence`, "evidence"]);
    said.push({ head: `Alert ${alert.name}`, text: alert.annotations.summary ?? "", kind: kindOf(alert.severity), links });
  }
  const pending = [...new Set(alerts.filter((alert) => alert.state === "pending").map((alert) => alert.name))];
  if (pending.length) said.push({ head: "Pending alerts", text: pending.join(", "), kind: "" });
  if (!said.length) said.push({ head: "Nothing", text: "found.", kind: "good" });
  each(find("wrong"), "li", said, write);
}

// Writes an item of what is wrong. If at most its age changes, its links keep the focus, and a screen reader does not read it again.
function write(item, { head, text, kind, links = [] }) {
  const [before, age, after] = aged(plain(text));
  const now = JSON.stringify([head, before, after, kind, links]);
  if (item.dataset.said !== now) {
    item.dataset.said = now;
    item.className = kind;
    const place = make("span");
    place.ariaLive = "off";
    item.replaceChildren(make("b", plain(head)), " ", before, place, after);
    for (const [url, name] of links) {
      const link = make("a", name);
      link.href = url;
      item.append(" ", link);
    }
  }
  say(item.querySelector("span"), age);
}

// A text in three parts: before its age, the age ("31 s" of "31 s ago", or of "for 31 s)" at its end), and after it.
function aged(text) {
  const found = /\b\d+ s(?= ago\b|\)$)/.exec(text);
  return found ? [text.slice(0, found.index), found[0], text.slice(found.index + found[0].length)] : [text, "", ""];
}

// Tables have their heads before there is anything to show.
export function begin() {
  ranks({ ranks: [] });
  inFlight({ in_flight: [], in_flight_more: 0 });
  showChosen({ chosen: [] });
}

function tiles(job) {
  const high = job.comm !== null && job.comm > LIMIT;
  const hidden = job.exposed !== null && job.exposed < WORTH;
  const kind = job.comm === null ? "quiet" : high && !hidden ? "bad" : "good";
  say(find("comm"), percent(job.comm), kind);
  const meter = find("comm-meter");
  meter.hidden = job.comm === null;
  meter.setAttribute("aria-valuenow", String(Math.round(100 * (job.comm ?? 0))));
  meter.setAttribute("aria-valuetext", `${percent(job.comm)} of the step; the line is at 30%`);
  meter.firstElementChild.style.width = `${100 * Math.min(1, job.comm ?? 0)}%`;
  meter.firstElementChild.className = kind === "bad" ? "bad" : "";
  say(find("comm-says"), job.comm === null ? (job.steps_unavailable ?? (job.step_s === null ? "no steps lately" : job.sheds ?? "operations have no times (COMMWATCH_TIMING)")) : made([job.split, job.says || (job.split ? "below the 30% line" : "of the step: below the 30% line")]));
  say(find("comm-of"), job.comm_of);
  say(find("exposed"), percent(job.exposed), job.exposed === null ? "quiet" : job.exposed > WORTH ? "warn" : "good");
  say(find("exposed-of"), job.exposed_of);
  say(find("step"), seconds(job.step_s), job.step_s === null ? "quiet" : "");
  say(find("pace"), job.steps_per_s === null ? "" : `${perSecond(job.steps_per_s)}, now at step ${job.step ?? UNKNOWN}`);
  const known = Object.values(job.states).reduce((sum, number) => sum + number, 0);
  say(find("ranks-here"), `${known} of ${job.world_size}`);
  say(find("ranks-say"), Object.entries(job.states).map(([state, number]) => `${number} ${state}`).join(", "));
  say(find("ranks-more"), known > job.ranks.length ? `The ${job.ranks.length} worst of ${known} ranks.` : "");
}

const made = (parts) => parts.filter(Boolean).join(": ");
const order = ({ kind }) => ["bad", "warn", "", "quiet"].indexOf(kind);

const RANKS = [
  ["rank"], ["state", true], ["step"], ["step time", false, "median of the latest steps"], ["comm", false, "share of the step"],
  ["exposed", false, "share of the step not hidden behind compute"], ["waits", false, "share of the last minute spent waiting for late ranks or messages"],
  ["GPU"], ["in flight", true, "the operation that has been in flight the longest"], ["for"], ["host", true],
];

function ranks(job) {
  const rows = job.ranks.map((rank) => {
    const op = rank.oldest;
    const over = ["left", "ended"].includes(rank.state);
    const lost = rank.state !== "running" && !over;
    const gpu = rank.gpu === null ? UNKNOWN : `${rank.gpu}: ${percent(rank.gpu_utilization)}`;
    return {
      key: rank.rank,
      kind: rank.verdict ? kindOf(rank.verdict) : lost ? "bad" : over ? "quiet" : "",
      cells: [
        { text: String(rank.rank), href: address({ open: rank.rank }), rank: rank.rank }, rank.verdict && rank.verdict !== rank.state ? `${rank.state}, ${rank.verdict}` : rank.state, rank.step === null ? UNKNOWN : String(rank.step), seconds(rank.step_s),
        percent(rank.comm), percent(rank.exposed), percent(rank.wait), gpu,
        op ? `${plain(op.op)} ${plain(op.group)}` : UNKNOWN, op ? seconds(op.age_s) : UNKNOWN, plain(rank.host),
      ],
      values: [rank.rank, , rank.step, rank.step_s, rank.comm, rank.exposed, rank.wait, rank.gpu, , op ? op.age_s : null],
    };
  });
  // Ranks in trouble come first, however many ranks there are.
  table(find("ranks"), RANKS, rows.sort((a, b) => order(a) - order(b)), "no rank is known");
}

const CHOSEN = [
  ["group", true], ["op", true], ["size", false, "of the message, at most"], ["algorithm", true], ["protocol", true], ["channels"], ["count", false, "of all ranks, since the agent reads the job"],
  ["mean", false, "time of an operation's kernels"], ["queued", false, "mean time from the launch to the start of the kernels"], ["busbw", false, "while the kernels ran"],
  ["last channel", false, "that ended last most often, in which part of the operations, and how long after the first channel the last one ended on average"],
];

const lastChannel = (each) => each.last_channel === null ? UNKNOWN : `${each.last_channel} (${percent(each.last_share)}, +${seconds(each.apart_s)})`;

export function showChosen({ chosen }) {
  find("chosen-section").hidden = !chosen.length;
  const rows = chosen.map((each) => ({
    kind: each.remark ? "warn" : "",
    cells: [
      plain(each.group), plain(each.op), each.size_log2 < 0 ? UNKNOWN : bytes(2 ** each.size_log2), each.algorithm ?? UNKNOWN, each.protocol ?? UNKNOWN,
      each.channels === null ? UNKNOWN : String(each.channels), String(each.count), seconds(each.mean_s), seconds(each.queued_s), rate(each.busbw),
      lastChannel(each),
    ],
    values: [, , each.size_log2, , , each.channels, each.count, each.mean_s, each.queued_s, each.busbw, each.last_share],
  }));
  table(find("chosen"), CHOSEN, rows, "");
}

const FLIGHT = [["rank"], ["op", true], ["group", true], ["number", false, "of the collective in its group"], ["size", false, "of the message"], ["for"], ["usually", false, "median of such operations of this rank"]];

const inFlightPasses = ({ rank, op, group, size_bytes: size }) => passes({ rank, op, group, size: sizeClass(size) });

export function inFlight(job) {
  const rows = job.in_flight.filter(inFlightPasses).map((op) => ({
    kind: op.age_s > Math.max(10, 5 * (op.usual_s ?? 0)) ? "bad" : "",
    cells: [String(op.rank), plain(op.op), plain(op.group), String(op.seq), bytes(op.size_bytes), seconds(op.age_s), seconds(op.usual_s)],
    values: [op.rank, , , op.seq, op.size_bytes, op.age_s, op.usual_s],
  }));
  table(find("flight"), FLIGHT, rows, job.in_flight.length && !rows.length ? "nothing that passes the filter" : "nothing right now");
  const some = filtered("rank", "group", "op", "size") ? `the filter sees only the ${job.in_flight.length} oldest; there are ` : "and ";
  say(find("flight-more"), job.in_flight_more ? `${some}${job.in_flight_more} more` : "");
}

export function showInsights({ findings, advice }) {
  const found = findings.map((finding) => ({ head: finding.title, kind: kindOf(finding.severity), parts: [finding.says, finding.means, finding.do] }));
  const tries = advice.map((each) => ({ head: `${each.title}: ${each.gain}`, kind: "", parts: [...each.because, each.do] }));
  pieces(find("findings"), found, "No findings, or no logs (NCCL_DEBUG).");
  pieces(find("advice"), tries, "No advice so far.");
}

function pieces(place, items, empty) {
  const now = JSON.stringify(items);
  if (place.dataset.said === now) return; // focus and selection stay
  place.dataset.said = now;
  if (!items.length) return place.replaceChildren(make("p", empty, "note"));
  const open = new Set([...place.querySelectorAll("details[open] summary")].map((summary) => summary.textContent));
  place.replaceChildren(...items.map(({ head, kind, parts }) => {
    const details = make("details");
    details.append(make("summary", plain(head), kind), ...parts.filter(Boolean).map((part) => make("p", plain(part))));
    details.open = open.has(details.firstElementChild.textContent);
    return details;
  }));
}

// 0, 1, 2, 5 as "0-2, 5".
function spans(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (found.length && number === found.at(-1)[1] + 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? from : `${from}-${to}`)).join(", ");
}
