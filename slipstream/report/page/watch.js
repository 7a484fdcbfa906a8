// The page of a run that goes on: fetches the charts anew when they have changed.
"use strict";

let stamp = "";

async function refresh() {
  const state = document.getElementById("live");
  try {
    const answer = await fetch("body" + location.search, { headers: { "If-None-Match": stamp } });
    if (answer.status === 200) {
      stamp = answer.headers.get("ETag") || "";
      const open = [...document.querySelectorAll("details[open]")].map((each) => each.id);
      const focused = document.activeElement && document.activeElement.closest("figure");
      const at = focused ? shown.get(document.activeElement) : undefined;
      document.querySelector("main").innerHTML = await answer.text();
      open.forEach((id) => { const each = document.getElementById(id); if (each) each.open = true; });
      const again = focused && document.querySelector("#" + focused.id + " .plot");
      if (again) { again.focus(); if (at !== undefined) read(again, at); }
    } else if (answer.status !== 304) {
      throw new Error("status " + answer.status);
    }
    state.textContent = "live";
    state.className = "good";
  } catch (error) {
    state.textContent = "slipstream watch does not answer; what is shown is old";
    state.className = "bad";
  }
  setTimeout(refresh, 2000);
}

refresh();
