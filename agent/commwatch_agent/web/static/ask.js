// Requests to the agent's API.

// The address of a route with parameters; those that are null are left out.
export function url(route, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null);
  return `/api/v1/${route}?${new URLSearchParams(given)}`;
}

// Returns the answer to a route. Throws an Error with the agent's reason.
export async function ask(route, parameters) {
  let answer;
  try {
    answer = await fetch(url(route, parameters));
  } catch {
    throw new Error("the agent does not answer");
  }
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.detail ?? `status ${answer.status}`);
  return found;
}

// A long range takes the agent long. So that the page costs it little, a question is repeated only after so many times the time of
// its answer, or after so many seconds.
const SELDOM = 400;
const MOST_S = 300;
const MOST_PARTIAL_S = 30;

// Seconds after which a question is asked again, at least `least`; `took`: seconds that its answer took, `partial`: whether nodes are
// missing in it.
export const pause = (least, took, partial = false) => Math.max(least, Math.min(partial ? MOST_PARTIAL_S : MOST_S, SELDOM * took));

// The same of a question on a time range; after a failure it is asked again soon.
const AGAIN_S = 20;
const RETRY_S = 5;
export const again = (failed, took, partial) => (failed ? RETRY_S : pause(AGAIN_S, took, partial));

// Calls `show` with the latest answer only: an earlier question whose answer comes later is dropped.
export class Latest {
  constructor(show) {
    this.show = show;
    this.number = 0;
    // Seconds that the latest answer took.
    this.took = 0;
  }

  async ask(question) {
    const number = ++this.number;
    const began = performance.now();
    let found;
    try {
      found = { data: await question() };
    } catch (error) {
      found = { why: error.message };
    }
    this.took = (performance.now() - began) / 1000;
    if (number === this.number) this.show(found);
  }

  drop() {
    this.number += 1;
  }
}
