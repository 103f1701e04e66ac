// The live page: shows the agent's events, and warns when there are none.

import { count, moment as momentOf, part, plain, timeOfDay } from "./words.js";
import { each, find, say } from "./elements.js";
import { Plots } from "./plots.js";
import { downloads } from "./downloads.js";
import { beginFilters, offer, offerAll, offerLatest } from "./filters.js";
import { beginKeys } from "./keys.js";
import { OperationsTable } from "./operations.js";
import { PastJobs, showPast } from "./past.js";
import { Range } from "./range.js";
import { RankPage } from "./rank.js";
import { begin, inFlight, showChosen, showInsights, showJob, still } from "./show.js";
import { onChange, set, state } from "./state.js";
import { Timeline } from "./timeline.js";

// The agent sends an event each second.
const STALE_MS = 4000;
const AGAIN_MS = 2000;

const plots = new Plots();
const timeline = new Timeline();
const operations = new OperationsTable();
const rankPage = new RankPage();
const range = new Range(showRange);
const wanted = state().job;
const past = new PastJobs(wanted, () => received && show(received));
// The latest moment; whether it has a job, which the history may know better later; and the job of the history that is shown.
let received = null;
let inMemory = false;
let pastShown = null;
let source = null;
let heardAt = Date.now();
let heard = false;
let shown = null;
// Job of the past data shown; undefined: none has come yet.
let pastOf;
// Whether there was some, or it was asked for again once the job had operations.
let hasPast = false;
// The latest state of a job.
let latest = null;
let pausedAt = null;
// A page that is opened paused shows each topic once. These are still to come.
const firsts = new Set(state().paused ? ["past", "timeline", "operations", "insights", "moment"] : []);
// The agent's reason for refusing the stream.
let refusal = "";

function listen() {
  source?.close();
  if (document.hidden) return;
  source = new EventSource(`/api/v1/stream${wanted === null ? "" : `?job=${encodeURIComponent(wanted)}`}`);
  on("past", ({ job_id: job, slots }) => {
    hasPast ||= slots.length > 0;
    pastOf = job;
    plots.begin(slots);
  });
  on("timeline", (seen) => timeline.show(seen));
  on("operations", showOperations);
  on("insights", showInsights);
  on("moment", show);
  source.addEventListener("moment", () => {
    if (state().paused) pausedAt ??= Date.now();
    heardAt = Date.now();
    heard = true;
    refusal = "";
    watch();
  });
  // The browser reconnects automatically, unless the agent refused.
  source.onerror = () => {
    if (source.readyState !== EventSource.CLOSED) return;
    ask(source.url);
    setTimeout(listen, AGAIN_MS);
  };
}

// Events are dropped while the page is paused, because the agent sends all data again when the page continues.
function on(topic, showIt) {
  source.addEventListener(topic, (event) => {
    const first = firsts.delete(topic);
    if (!pausedAt || first) showIt(JSON.parse(event.data));
  });
}

// An EventSource does not give the reason of a refusal.
async function ask(url) {
  const done = new AbortController();
  try {
    const answer = await fetch(url, { signal: done.signal });
    refusal = answer.ok ? "" : ((await answer.json()).detail ?? "");
  } catch {
    refusal = "";
  }
  done.abort();
  watch();
}

function showOperations(event) {
  operations.hear(event);
  showChosen(event);
  offerLatest(event.job_id, event.rows);
  // The past may have been asked for before the agent had read anything of the job.
  if (event.rows.length && pastOf === event.job_id && !hasPast) {
    hasPast = true;
    listen();
  }
}

// What follows from the time range; `stored`: what the agent has of it, null: nothing is needed, or it has not come yet.
function showRange(window, stored) {
  const moves = window === null || (state().from === null && latest.job.state !== "ended");
  plots.range(window, stored, moves && latest.job.state !== "ended" ? latest.at : null, latest.job.state === "ended" ? latest.job.started_at : null);
  const why = stored === null ? "Not loaded yet." : "No operation of this time is stored.";
  timeline.range(moves ? null : { to: window.to, timeline: stored?.timeline ?? null, why });
  downloads(latest, window);
  operations.tick(latest, window);
  rankPage.tick(latest, window, moves);
}

function show(moment) {
  received = moment;
  const { job } = moment;
  if (job !== null && pastOf !== undefined && pastOf !== job.job_id) {
    pastOf = undefined;
    hasPast = false;
    plots.begin([]);
    listen(); // the past data shown is that of the previous job, or was asked for before the agent had read this one
  }
  if (job !== null && shown !== job.job_id) offerAll(job.job_id);
  shown = job?.job_id ?? shown;
  choices(moment);
  if (job === null) return nothing(moment);
  inMemory = true;
  pastShown = null;
  arrange({ job: true, present: true });
  const open = moment.incidents.some(({ state, severity }) => state === "open" && severity !== "info");
  document.title = `${open ? "! " : ""}${plain(job.job_id)} · commwatch`;
  const restarts = job.restarts ? `, restarted ${count(job.restarts, "time")}` : "";
  const halted = still(moment);
  say(find("about"), `${plain(job.job_id)}, ${job.state}${job.ending ? ` (${plain(job.ending)})` : ""}${restarts}, ${job.state === "running" ? "since" : "began"} ${momentOf(job.started_at)}, on ${where(moment)}.${halted && ` ${halted}.`}`);
  const several = moment.nodes.answered > 1;
  // These come from the agent's own node alone.
  for (const place of document.querySelectorAll(".of-node")) say(place, several ? ` on ${plain(moment.host)}` : "");
  latest = moment;
  showJob(moment);
  plots.mark(moment.incidents);
  offer({ rank: job.ranks.map(({ rank }) => rank) });
  plots.add(job.slots);
  range.tick(moment);
}

// The node, or how many nodes have answered.
function where({ host, nodes }) {
  return part(nodes) ?? (nodes.answered === 1 ? plain(host) : `${nodes.answered} nodes`);
}

// Shows the parts of the page that there is something for.
function arrange({ empty = false, job = false, present = false }) {
  find("empty").hidden = !empty;
  find("job").hidden = !job;
  find("present").hidden = !present;
  find("past").hidden = present;
}

// The agent has no such job in memory; it may have it in its history.
function nothing({ version, host }) {
  if (inMemory) past.load();
  inMemory = false;
  if (past.jobs === null) return say(find("about"), `Agent ${version} on ${plain(host)}.`);
  const job = past.job();
  arrange({ empty: job === undefined, job: job !== undefined });
  document.title = job === undefined ? "commwatch" : `${plain(job.job_id)} · commwatch`;
  if (job !== undefined) {
    if (pastShown !== job) showPast(job);
    pastShown = job;
    return;
  }
  say(find("about"), `Agent ${version} on ${plain(host)}.`);
  say(find("empty-title"), wanted === null ? "No job here yet" : `No job ${plain(wanted)} here`);
  find("empty-unknown").hidden = wanted === null;
}

// Options: the latest job (value ""), and each job by its name.
function choices({ jobs, job }) {
  const select = find("jobs");
  const ended = past.names().filter((name) => !jobs.some((each) => each.job_id === name));
  find("choice").hidden = wanted === null && jobs.length + ended.length < 2;
  const options = [["", "the latest"], ...jobs.map((each) => [each.job_id, `${plain(each.job_id)}${each.running ? "" : past.how(each.job_id)}`])];
  options.push(...ended.map((name) => [name, `${plain(name)}${past.how(name)}`]));
  if (wanted !== null && !options.some(([name]) => name === wanted)) options.push([wanted, `${plain(wanted)}${past.job() ? "" : " (not here)"}`]);
  const now = JSON.stringify(options);
  if (select.dataset.options === now) return;
  select.dataset.options = now;
  const chosen = select.options.length ? select.value : (wanted ?? "");
  each(select, "option", options, (option, [value, text]) => {
    option.value = value;
    say(option, text);
  });
  select.value = chosen;
}

// Marks old data as old. The text does not change meanwhile, so that a screen reader reads it once.
function watch() {
  const old = Date.now() - heardAt > STALE_MS;
  document.body.classList.toggle("old", old || pausedAt !== null);
  find("stale").hidden = !old && pausedAt === null;
  const before = heard ? `OLD: no data from the agent since ${timeOfDay(heardAt / 1000)}. The values below are from that time.` : "No data from the agent yet.";
  if (old) say(find("stale"), `${before}${refusal ? ` The agent's answer: ${refusal}.` : ""} Trying again.`);
  else if (pausedAt !== null) say(find("stale"), `Paused at ${timeOfDay(pausedAt / 1000)}. The values below are frozen; the agent continues.`);
}

find("pause").addEventListener("click", () => set({ paused: state().paused ? null : 1 }, { replace: true }));
find("jobs").addEventListener("change", (event) => {
  location.search = event.target.value ? `?job=${encodeURIComponent(event.target.value)}` : "";
});
onChange((before) => {
  if (latest !== null) inFlight(latest.job);
  if (state().paused === before.paused) return;
  firsts.clear();
  pausedAt = state().paused ? Date.now() : null;
  pauses();
  if (pausedAt === null) listen();
  watch();
});

function pauses() {
  find("pause").ariaPressed = String(Boolean(state().paused));
}

// While the page is hidden, the agent need not send events.
document.addEventListener("visibilitychange", listen);

begin();
beginFilters();
beginKeys();
pauses();
setInterval(watch, 1000);
listen();
