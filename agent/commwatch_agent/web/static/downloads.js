// Links that download files. They follow the time range and the filters, as far as the routes can.

import { url } from "./ask.js";
import { find, say } from "./elements.js";
import { filtered } from "./filters.js";
import { state } from "./state.js";

const ENDS = { "30s": "the last 30 s", "5m": "the last 5 min", "30m": "the last 30 min", all: "the whole job" };

// `window`: the time range, null: the present.
export function downloads({ job: { job_id: job }, nodes }, window) {
  const { last, rank, group, op } = state();
  const scope = nodes.answered > 1 ? "job" : null;
  const within = window === null ? {} : { since: Math.floor(window.from), until: Math.ceil(window.to) };
  const part = window === null || last !== null ? { last: last ?? "30s" } : within;
  find("get-timeline").href = url("timeline", { job, scope, ...part });
  say(find("get-timeline"), `${ENDS[part.last] ?? "the range"} for Perfetto`);
  find("get-operations").href = url("ops", { job, ...within, rank, group, op, limit: 10000, format: "csv" });
  const filter = filtered("rank", "group", "op") ? ", filtered" : "";
  say(find("get-operations"), `the latest operations${window === null ? "" : " of the range"} as CSV${filter}${filtered("size") ? ", of all sizes" : ""}`);
  find("get-report").href = url("report", { job, scope, format: "html" });
}
