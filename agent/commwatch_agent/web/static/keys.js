// Keys of the page, and the dialog that lists them.

import { find } from "./elements.js";
import { close } from "./rank.js";
import { live } from "./range.js";
import { set, state } from "./state.js";

const KEYS = {
  "?": () => find("help").showModal(),
  p: () => set({ paused: state().paused ? null : 1 }, { replace: true }),
  l: live,
  "/": () => find("filter-rank").focus(),
};

export function beginKeys() {
  find("keys").addEventListener("click", KEYS["?"]);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || find("help").open) return;
    if (event.target.closest("input, select, textarea")) return;
    const timeline = event.target.closest("#timeline"); // has its own Escape
    const action = event.key === "Escape" ? !timeline && state().open !== null && close : KEYS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
