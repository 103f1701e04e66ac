// The live page: listens to the agent, says when it does not hear from it, and shows what it hears.

import { find, make, say } from "./elements.js";
import { Plots } from "./plots.js";
import { showJob, showOperations, showTold } from "./show.js";
import { Timeline } from "./timeline.js";
import { plain, seconds } from "./words.js";

// The agent speaks each second.
const STALE_MS = 4000;
const AGAIN_MS = 2000;

const plots = new Plots();
const timeline = new Timeline();
const wanted = new URLSearchParams(location.search).get("job");
let source = null;
let heardAt = Date.now();
let shown = null;
let paused = false;
let heard = null;

function listen() {
  source?.close();
  source = new EventSource(`/api/v1/stream${wanted === null ? "" : `?job=${encodeURIComponent(wanted)}`}`);
  source.addEventListener("past", (event) => plots.begin(JSON.parse(event.data).slots));
  source.addEventListener("timeline", (event) => paused || timeline.show(JSON.parse(event.data)));
  source.addEventListener("operations", (event) => paused || showOperations(JSON.parse(event.data)));
  source.addEventListener("told", (event) => showTold(JSON.parse(event.data)));
  source.addEventListener("moment", (event) => {
    heardAt = Date.now();
    heard = JSON.parse(event.data);
    if (!paused) show(heard);
    watch();
  });
  // The browser connects again by itself, unless the agent refused.
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN_MS);
  };
}

function show(moment) {
  const { job } = moment;
  if (shown !== null && job !== null && shown !== job.job_id) listen(); // another job: its own past
  shown = job?.job_id ?? shown;
  find("empty").hidden = job !== null;
  find("job").hidden = job === null;
  choices(moment);
  document.title = job === null ? "commwatch" : `${job.verdicts.length ? "! " : ""}${plain(job.job_id)} · commwatch`;
  if (job === null) return say(find("about"), `Agent ${moment.version} on ${plain(moment.host)}${wanted === null ? "" : `, which does not know job ${plain(wanted)} (any more)`}.`);
  const restarts = job.restarts ? `, restarted ${job.restarts} times` : "";
  say(find("about"), `${plain(job.job_id)}, ${job.state}${restarts}, since ${new Date(job.started_at * 1000).toLocaleString([], { hour12: false })}, on ${plain(moment.host)}.`);
  showJob(moment);
  plots.add(job.slots);
}

function choices({ jobs, job }) {
  const select = find("jobs");
  find("choice").hidden = jobs.length < 2;
  const names = jobs.map((each) => each.job_id);
  if (select.dataset.names !== JSON.stringify(names)) {
    select.dataset.names = JSON.stringify(names);
    select.replaceChildren(...jobs.map((each) => {
      const option = make("option", `${plain(each.job_id)}${each.running ? "" : " (ended)"}`);
      option.value = each.job_id;
      return option;
    }));
  }
  if (job && document.activeElement !== select) select.value = job.job_id;
}

// What is shown must never pass for the present when it is not.
function watch() {
  const silent = Date.now() - heardAt;
  const old = silent > STALE_MS;
  document.body.classList.toggle("old", old);
  find("stale").hidden = !old && !paused;
  if (old) say(find("stale"), `OLD: the agent has not been heard for ${seconds(Math.round(silent / 1000))}. ${heard ? "What follows is as old. " : ""}Trying again.`);
  else if (paused) say(find("stale"), "Paused. What follows stands still; the agent goes on.");
}

find("pause").addEventListener("click", () => {
  paused = !paused;
  find("pause").setAttribute("aria-pressed", String(paused));
  if (!paused && heard) show(heard);
  watch();
});
find("jobs").addEventListener("change", (event) => {
  location.search = `?job=${encodeURIComponent(event.target.value)}`;
});
// Nobody looks: the agent need not either.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else listen();
});

setInterval(watch, 1000);
listen();
