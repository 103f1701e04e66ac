// Shows the state of a job in words, numbers and tables.

import { find, make, makeWithCode, say } from "./elements.js";
import { filtered, passes, sizeClass } from "./filters.js";
import { kindOf, showIncidents } from "./incidents.js";
import { address } from "./state.js";
import { table } from "./tables.js";
import { UNKNOWN, bytes, percent, perSecond, plain, rate, seconds, stateInWords, timeOfDay, timeOrDate } from "./words.js";

const LIMIT = 0.3;
// Exposed communication below this share is not mentioned (as in commwatch's advice).
const WORTH = 0.1;

export function showJob({ at, job, alerts, incidents, trouble, nodes }) {
  const shown = showIncidents(incidents, alerts, troubles(job, trouble, nodes));
  find("wrong-section").hidden = job.state === "ended" && !shown.wrong;
  showHappened(shown.happened, job.state === "ended");
  tiles(job, still({ at, job, incidents }));
  ranks(job, incidents);
  inFlight(job);
}

// Of a job that has ended, that nothing was found is known, too.
export function showHappened(number, ended) {
  find("happened-section").hidden = !number && !ended;
  say(find("happened-none"), number ? "" : "Nothing was found.");
}

// What keeps the agent from knowing all of a job.
function troubles({ sheds }, trouble, { silent }) {
  const found = trouble ? [{ head: "The agent", text: trouble, kind: "bad" }] : [];
  for (const [url, why] of Object.entries(silent)) {
    found.push({ head: `No answer from ${url}`, text: `(${why}): the ranks of its node are missing below.`, kind: "bad" });
  }
  if (sheds) found.push({ head: "The probe", text: sheds, kind: "warn" });
  return found;
}

// Tables have their heads before there is anything to show.
export function begin() {
  ranks({ ranks: [] }, []);
  inFlight({ in_flight: [], in_flight_more: 0 });
  showChosen({ chosen: [] });
}

const STILL = new Set(["hang", "stalled", "desync", "init_incomplete"]);

// That nothing moves, and since when; empty: it does, or that is not known. Without steps, only an incident shows it.
export function still({ at, job, incidents }) {
  if (job.figures_at !== null) return `No step for ${seconds(at - job.figures_at)}`;
  const incident = job.step === null && incidents.find(({ kind, state }) => state === "open" && STILL.has(kind));
  return incident ? `${plain(incident.title)}, since ${timeOrDate(incident.began_at)}` : "";
}

// If no step has ended for long, the figures are of then, and must not look as if they were of now.
function tiles(job, nothing) {
  const then = job.figures_at === null ? "" : `of ${timeOfDay(job.figures_at)}`;
  const unit = job.step_source === "iterations" ? "iteration" : "step";
  say(find("steps-title"), `The ${job.state === "ended" ? "last" : "latest"} ${unit}s`);
  const which = then && job.step_s !== null ? `: communication, exposed and step are ${then}` : "";
  say(find("figures-said"), nothing && `${nothing}${which}.`);
  const high = job.comm !== null && job.comm > LIMIT;
  const hidden = job.exposed !== null && job.exposed < WORTH;
  const kind = job.comm === null || then ? "quiet" : high && !hidden ? "bad" : "good";
  say(find("comm"), percent(job.comm), kind);
  const meter = find("comm-meter");
  meter.hidden = job.comm === null || Boolean(then);
  meter.setAttribute("aria-valuenow", String(Math.round(100 * (job.comm ?? 0))));
  meter.setAttribute("aria-valuetext", `${percent(job.comm)} of the ${unit}; the line is at 30%`);
  meter.firstElementChild.style.width = `${100 * Math.min(1, job.comm ?? 0)}%`;
  meter.firstElementChild.className = kind === "bad" ? "bad" : "";
  say(find("comm-says"), job.comm === null ? (job.steps_unavailable ?? (job.step_s === null ? `no ${unit}s lately` : job.sheds ?? "operations have no times (COMMWATCH_TIMING)")) : then || made([job.split, job.says || (job.split ? "below the 30% line" : `of the ${unit}: below the 30% line`)]));
  say(find("comm-of"), job.comm_of);
  say(find("exposed"), percent(job.exposed), job.exposed === null || then ? "quiet" : job.exposed > WORTH ? "warn" : "good");
  say(find("exposed-of"), [job.exposed_of, then && job.exposed !== null ? `(${then})` : ""].join(" "));
  say(find("step"), seconds(job.step_s), job.step_s === null || then ? "quiet" : "");
  say(find("pace"), then ? `${then}, at ${unit} ${job.step ?? UNKNOWN}` : job.steps_per_s === null ? "" : `${perSecond(job.steps_per_s)}, now at ${unit} ${job.step ?? UNKNOWN}`);
  const known = Object.values(job.states).reduce((sum, number) => sum + number, 0);
  say(find("ranks-here"), `${known} of ${job.world_size}`);
  say(find("ranks-say"), Object.entries(job.states).map(([state, number]) => `${number} ${stateInWords(state)}`).join(", "));
  say(find("ranks-more"), known > job.ranks.length ? `The ${job.ranks.length} worst of ${known} ranks.` : "");
}

const made = (parts) => parts.filter(Boolean).join("; ");
const order = ({ kind }) => ["bad", "warn", "", "quiet"].indexOf(kind);

const RANKS = [
  ["rank"], ["state", true], ["step"], ["step time", false, "median of the latest steps"], ["comm", false, "share of the step"],
  ["exposed", false, "share of the step not hidden behind compute"], ["waits", false, "share of the last minute spent waiting for late ranks or messages"],
  ["GPU"], ["in flight", true, "the operation that has been in flight the longest"], ["for"], ["host", true],
];

// The first incident, worse than for information, that names a rank, and is open or ended with the job: a cause, rather than its consequence.
function blame(incidents) {
  const worse = incidents.filter(({ severity }) => severity !== "info");
  const open = worse.filter(({ state, outcome }) => state === "open" || outcome === "job_ended").reverse();
  return new Map(open.flatMap((incident) => incident.ranks.map((rank) => [rank, incident])));
}

function ranks(job, incidents) {
  const blamed = blame(incidents);
  const rows = job.ranks.map((rank) => {
    const op = rank.oldest;
    const incident = blamed.get(rank.rank);
    const name = incident?.kind.replaceAll("_", " ");
    const over = ["left", "ended"].includes(rank.state);
    const lost = rank.state !== "running" && !over;
    const gpu = rank.gpu === null ? UNKNOWN : `${rank.gpu}: ${percent(rank.gpu_utilization)}`;
    return {
      key: rank.rank,
      kind: incident ? kindOf(incident) : lost ? "bad" : over ? "quiet" : "",
      cells: [
        { text: String(rank.rank), href: address({ open: rank.rank }), rank: rank.rank }, name ? `${stateInWords(rank.state)}, ${name}` : stateInWords(rank.state), rank.step === null ? UNKNOWN : String(rank.step), seconds(rank.step_s),
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
  const found = findings.map((finding) => {
    const lines = finding.evidence.map(({ file, line, text }) => `${file}:${line}: ${text}`);
    return { head: finding.title, kind: kindOf(finding), parts: [finding.says, finding.means, finding.do, ...lines] };
  });
  const tries = advice.map((each) => ({ head: `${each.title}: ${each.gain}`, kind: "", parts: [...each.because, each.do] }));
  pieces(find("findings"), found, "No findings, or no logs (NCCL_DEBUG, output in files).");
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
    details.append(make("summary", plain(head), kind), ...parts.filter(Boolean).map((part) => makeWithCode("p", plain(part))));
    details.open = open.has(details.firstElementChild.textContent);
    return details;
  }));
}
