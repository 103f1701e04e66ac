// Incidents: what is wrong, and what happened; each consequence below its cause.

import { each, find, make, makeWithCode, say } from "./elements.js";
import { plain, seconds, timeOrDate } from "./words.js";

const KINDS = { critical: "bad", error: "bad", warning: "warn", info: "" };

export const kindOf = ({ severity }) => KINDS[severity] ?? "warn";

// Shows in `wrong` the incidents that last, after what else is wrong (`more`), and in `happened` those that have ended. A cause that has ended
// is shown with its consequences while one of them lasts.
export function showIncidents(incidents, alerts, more) {
  const families = familiesOf(incidents);
  const lasts = (family) => family.some(({ incident }) => incident.ended_at === null);
  const items = (some) => some.flat().map(({ incident, depth }) => itemOf(incident, depth, alerts));
  const open = families.filter(lasts);
  const wrong = [...more, ...items(open)];
  const isWrong = more.length || !open.length || open.flat().some(({ incident }) => incident.severity !== "info");
  say(find("wrong-title"), isWrong ? "What is wrong" : "For information");
  const happened = items(families.filter((family) => !lasts(family)));
  each(find("wrong"), "li", wrong.length ? wrong : [{ head: "Nothing", text: "found.", kind: "good" }], write);
  each(find("happened"), "li", happened, write);
  return { wrong: wrong.length, happened: happened.length };
}

// Families of incidents in the order of the agent: each begins with an incident that no other one here explains. As in
// agent/commwatch_agent/incidents/families.py, a long wait is left out below the stall or hang that it became.
function familiesOf(incidents) {
  const left = new Map(incidents.map((incident) => [incident.id, incident]));
  const below = (cause, depth) => {
    left.delete(cause.id);
    const effects = incidents.filter(({ id, consequence_of: of }) => of === cause.id && left.has(id));
    const shown = !depth || !becameFault(cause, incidents);
    const more = effects.flatMap((effect) => (left.has(effect.id) ? below(effect, shown ? depth + 1 : depth) : []));
    return shown ? [{ incident: cause, depth }, ...more] : more;
  };
  const first = incidents.filter(({ consequence_of: of }) => !left.has(of));
  return [...first, ...incidents].flatMap((incident) => (left.has(incident.id) ? [below(incident, 0)] : []));
}

function becameFault(wait, incidents) {
  const isOneWait = (other) => ["job_id", "group_id", "op", "seq"].every((name) => wait[name] === other[name]) && Math.abs(wait.began_at - other.began_at) <= 1;
  return wait.kind === "waiting" && incidents.some((other) => ["stalled", "hang"].includes(other.kind) && isOneWait(other));
}

// One that is pending has not lasted for long enough to be sure of. What to do about a consequence is to end its cause.
function itemOf(incident, depth, alerts) {
  const pending = incident.state === "pending";
  const over = incident.ended_at === null && incident.holds === false; // only its alert fires on
  const firing = alerts.filter(({ state, annotations }) => state === "firing" && annotations.incident === incident.id);
  return {
    head: `${incident.title}${pending ? " (pending)" : over ? " (over)" : ""}`, text: incident.says, kind: pending || over ? "" : kindOf(incident), depth,
    place: incident.place && `in ${incident.place}`, when: `${when(incident)}${cost(incident)}`, remedy: pending || over || depth ? "" : incident.remedy,
    links: [
      ...firing.map(({ name }) => [`/runbook#${name.toLowerCase()}`, `alert ${name}`]),
      [`/incidents/${encodeURIComponent(incident.id)}`, "evidence"],
    ],
  };
}

// As in agent/commwatch_agent/incidents/words.py.
function when({ kind, began_at: began, last_at: last, ended_at: ended, outcome, holds }) {
  if (kind === "rank_lost") return `at ${timeOrDate(began)}`;
  const lasted = seconds(Math.max(0, (ended ?? last) - began));
  if (ended === null && holds === false) return `since ${timeOrDate(began)}, for ${lasted}; not seen since ${timeOrDate(last)}`;
  if (ended === null) return `since ${timeOrDate(began)}${last - began < 1 ? "" : `, for ${lasted} so far`}`;
  return `${timeOrDate(began)}, for ${lasted}, until ${outcome === "job_ended" ? "the job ended" : timeOrDate(ended)}`;
}

const cost = ({ cost_rank_s: lost }) => (lost ? `; cost ${seconds(lost)} of rank time` : "");

// Writes an item. If at most its age changes, its links keep the focus, and a screen reader does not read it again.
function write(item, { head, text, kind, depth = 0, place = "", when = "", remedy = "", links = [] }) {
  const [before, age, after] = aged(plain(text));
  const now = JSON.stringify([head, before, after, kind, depth, place, remedy, links]);
  if (item.dataset.said !== now) {
    item.dataset.said = now;
    item.className = kind;
    item.dataset.depth = Math.min(depth, 3);
    const says = make(when ? "p" : "span");
    says.append(before, quiet(), after);
    item.replaceChildren(make("b", plain(head)), " ", plain(place), says);
    if (when) item.append(quiet("when"));
    if (remedy) item.append(makeWithCode("p", plain(remedy)));
    const line = make("p", undefined, "links");
    for (const [url, name] of links) {
      const link = make("a", plain(name));
      link.href = url;
      line.append(link, " ");
    }
    if (links.length) item.append(line);
  }
  say(item.querySelector("[aria-live]"), age);
  if (when) say(item.querySelector(".when"), when);
}

// What a screen reader does not read when it changes.
function quiet(kind) {
  const place = make("span", undefined, kind);
  place.ariaLive = "off";
  return place;
}

// A text in three parts: before its age, the age ("31 s" of "31 s ago", or of "for 31 s)" at its end), and after it.
function aged(text) {
  const found = /\b\d+ s(?= ago\b|\)$)/.exec(text);
  return found ? [text.slice(0, found.index), found[0], text.slice(found.index + found[0].length)] : [text, "", ""];
}
