// Jobs that the agent has in its history alone: their names, and what it still knows of the one whose page this is.

import { ask, url } from "./ask.js";
import { find, say } from "./elements.js";
import { showIncidents } from "./incidents.js";
import { showHappened } from "./show.js";
import { moment, plain } from "./words.js";

const RETRY_MS = 5000;
const MOST_NAMES = 100;

export class PastJobs {
  // `wanted`: the job whose page this is, null: the latest; changed(): there is something new.
  constructor(wanted, changed) {
    this.wanted = wanted;
    this.changed = changed;
    // The latest run of each name, the latest first; null: not known yet.
    this.jobs = null;
    this.load();
  }

  async load() {
    try {
      this.jobs = await ask("jobs", {});
      this.changed();
    } catch {
      setTimeout(() => this.load(), RETRY_MS);
    }
  }

  // How a job ended that does not run, as `commwatch jobs` has it.
  how(name) {
    return (this.jobs ?? []).find((job) => job.job_id === name)?.failed ? " (failed)" : " (ended)";
  }

  names() {
    return (this.jobs ?? []).slice(0, MOST_NAMES).map((job) => job.job_id);
  }

  // The job whose page this is; undefined: there is none. Of an earlier run only its name is known.
  job() {
    const jobs = this.jobs ?? [];
    if (this.wanted === null) return jobs[0];
    const known = jobs.find((job) => job.job_id === this.wanted);
    return known ?? (jobs.some((job) => job.earlier.includes(this.wanted)) ? { job_id: this.wanted, state: "ended", ending: "" } : undefined);
  }
}

// Shows a job of the history.
export async function showPast(job) {
  const when = job.started_at ? `, from ${moment(job.started_at)} to ${moment(job.last_seen_at)}, ${job.ranks.length} of ${job.world_size} ranks here` : "";
  say(find("about"), `${plain(job.job_id)}, ${job.failed ? "failed" : job.state}${job.ending ? ` (${plain(job.ending)})` : ""}${when}.`);
  find("past-report").href = url("report", { job: job.job_id, format: "html" });
  const found = await ask("incidents", { job: job.job_id, scope: "job" }).then(({ data }) => data, (error) => error);
  if (find("past").hidden) return; // the job, or another one, is in memory now
  if (found instanceof Error) return say(find("past-said"), `What happened is not known: ${found.message}.`);
  say(find("past-said"), "");
  const shown = showIncidents(found.filter(({ state }) => state !== "pending").map((incident) => over(incident, job)), [], []);
  find("wrong-section").hidden = !shown.wrong;
  showHappened(shown.happened, true);
}

// An incident of a job whose end no agent has seen ended when it last held.
const over = (incident, { state }) => (state === "ended" && incident.ended_at === null ? { ...incident, ended_at: incident.last_at, outcome: "job_ended" } : incident);
