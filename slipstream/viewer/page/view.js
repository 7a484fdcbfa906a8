// The page: what is shown of the chosen trajectory, keys and pointer, and the address that leads back here.

const byId = (id) => document.getElementById(id);
const stream = byId("stream"), tip = byId("tip"), main = byId("one");
let mode = "mask";
let shown = null;      // { line, item, tokens, newest } of the trajectory on the page
let now = -1;          // the token that the keys are at
let unfolded = false;  // prompts stay as the reader left them

// -- one trajectory -------------------------------------------------------------------------------------------------

async function open(line, { scroll = true } = {}) {
  selected = line;
  if (scroll) bringIntoView(line);
  drawList();
  remember();
  let page;
  try { page = await pageOf(line.page); } catch (error) { complain(error.message); return; }
  if (selected !== line) return;  // the reader has gone on
  const item = page.items[line.slot];
  const tokens = tokensOf(line, item, page.texts);
  shown = { line, item, tokens, newest: newestOf(tokens, item) };
  now = -1;
  hideTip();
  byId("empty").hidden = true;
  byId("article").hidden = false;
  drawFacts(line, item);
  drawGroup(line);
  drawStream(item, tokens);
  paint();
  main.scrollTop = 0;
  byId("said").textContent = `Trajectory ${line.lease}, reward ${line.reward ?? "none"}, ${metaOf(line)}`;
}

function complain(text) {
  byId("article").hidden = true;
  byId("empty").hidden = false;
  byId("empty").textContent = text;
}

function drawFacts(line, item) {
  byId("title").textContent = `#${line.lease}  ${line.task}`;
  const fact = (name, value) => { const made = element("span", "", `${name} `); made.append(element("b", "", value)); return made; };
  const parts = Object.entries(item.parts).map(([name, value]) => fact(name, value === null ? "not finite" : String(+value.toFixed(4))));
  const reward = element("span", "", "reward ");
  reward.append(rewardOf(line.reward));
  const seconds = item.seconds;
  byId("facts").replaceChildren(
    reward, ...parts, fact("outcome", line.outcome.replaceAll("_", " ")), fact("fate", line.fate),
    ...(line.step === null ? [] : [fact("step", String(line.step))]),
    ...(item.advantage === null ? [] : [fact("advantage", signed(item.advantage, 3))]),
    fact("tokens", `${line.sampled.toLocaleString("en")} sampled of ${line.tokens.toLocaleString("en")}`),
    fact("turns", String(line.turns)),
    ...(line.calls ? [fact("tool calls", `${line.calls}${line.errors ? ` (${count(line.errors, "error")})` : ""}: ${line.tools.join(", ") || "?"}`)] : []),
    ...(line.stale === null ? [] : [fact("staleness", String(line.stale))]),
    ...(line.attempt ? [fact("attempt", String(line.attempt + 1))] : []),
    fact("took", `${seconds.all.toFixed(1)} s: ${seconds.generate.toFixed(1)} generating, ${seconds.tools.toFixed(1)} in tools, ${seconds.wait.toFixed(1)} waiting`),
  );
  const ended = byId("ended");
  ended.hidden = !item.error;
  ended.textContent = item.error;
}

function groupOf(line) { return line.heldout ? [] : lines.filter((each) => each.group === line.group); }

function drawGroup(line) {
  const members = groupOf(line);
  const buttons = members.map((member) => {
    const button = element("button");
    button.type = "button";
    button.setAttribute("aria-label", `Trajectory ${member.lease} of the group, reward ${member.reward ?? "none"}`);
    button.title = `#${member.lease}: ${metaOf(member)}`;
    if (member === line) button.setAttribute("aria-current", "true");
    button.append(rewardOf(member.reward));
    button.onclick = () => open(member);
    return button;
  });
  byId("group").replaceChildren(...(members.length > 1 ? [element("span", "", `group ${line.group}`), ...buttons] : []));
}

const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/u;

/** Characters that cannot be seen, or that would move others about, stand as their numbers. */
function fill(span, text) {
  if (!text.includes("\n") && !ODD.test(text)) { span.textContent = text; return; }
  for (const character of text) {
    if (character === "\n") span.append(element("i", "nl"), "\n");
    else if (ODD.test(character)) span.append(element("span", "odd", `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`));
    else span.append(character);
  }
}

const SAYS = { prompt: "prompt", sampled: "model", tool: "tool", glue: "template", branch: "branch" };

function drawStream(item, tokens) {
  const turns = [];
  let at = 0, text = null;
  const section = (kind, turn) => {
    const made = element("section", `turn ${kind}`);
    const title = element("h3", "", SAYS[kind]);
    if (kind !== "prompt") title.append(element("small", "", `turn ${turn + 1}`));
    text = element("div", "text");
    made.append(title, text);
    made.kind = kind;
    turns.push(made);
  };
  const until = (end) => {
    for (; at < Math.min(end, tokens.length); at++) {
      const token = tokens[at], span = element("span", "t");
      fill(span, token.text);
      if (!token.text) span.classList.add(token.cluster ? "more" : "none");
      span.token = token;
      token.span = span;
      text.append(span);
    }
  };
  for (const [kind, turn, start, length] of item.spans) {
    if (start > at) { section("glue", turn); until(start); }
    if (kind !== "glue" || text === null) section(kind, turn);  // else it ends the one before
    until(start + length);
  }
  if (at < tokens.length) { section("glue", 0); until(tokens.length); }
  stream.replaceChildren(...turns);
  for (const made of turns) if (made.kind === "prompt" || made.kind === "branch") foldable(made);
}

function foldable(section) {
  const text = section.querySelector(".text");
  if (text.scrollHeight < 190) return;
  const button = element("button", "fold");
  button.type = "button";
  const set = () => {
    section.classList.toggle("folded", !unfolded);
    button.textContent = unfolded ? "Show less" : "Show all";
    button.setAttribute("aria-expanded", String(unfolded));
  };
  button.onclick = () => { unfolded = !unfolded; set(); };
  set();
  section.append(button);
}

function paint() {
  if (!shown) return;
  const { line, item, tokens, newest } = shown;
  const legend = new Map();
  for (const token of tokens) {
    const colour = colourOf(mode, token, item, newest);
    const trained = token.use === "trained" || token.use === "unknown";
    token.span.className = `t${token.cluster && token.cluster.place > 1 ? " more" : !token.text ? " none" : ""}${trained ? " in" : " out"}${colour.swatch ? " c" : ""}${token.at === now ? " now" : ""}`;
    if (colour.swatch) token.span.style.setProperty("--c", `var(${colour.swatch})`); else token.span.style.removeProperty("--c");
    const key = colour.swatch ? `${colour.name}${trained}` : "";
    const entry = legend.get(key) ?? { ...colour, trained, many: 0 };
    entry.many++;
    legend.set(key, entry);
  }
  const grey = legend.get("");
  legend.delete("");
  const entries = [...legend.values()].sort((a, b) => a.order - b.order || b.trained - a.trained);
  const items = entries.map((entry) => {
    const made = element("li"), swatch = element("i", entry.trained ? "" : "under");
    if (entry.trained) swatch.style.background = `var(${entry.swatch})`; else swatch.style.borderColor = `var(${entry.swatch})`;
    made.append(swatch, `${entry.name}${entry.trained || mode === "mask" ? "" : ", not trained"} (${entry.many.toLocaleString("en")})`);
    return made;
  });
  if (grey) {
    const made = element("li");
    const unsampled = tokens.filter((token) => !token.sampled).length, rest = grey.many - unsampled;
    made.append(element("i"), [unsampled && `not sampled (${unsampled.toLocaleString("en")})`, rest && `no value (${rest.toLocaleString("en")})`].filter(Boolean).join(", "));
    items.push(made);
  }
  byId("legend").replaceChildren(...items);
  const lack = lacking(mode, line, item);
  byId("note").hidden = !lack;
  byId("note").replaceChildren(...lack.split("`").map((part, at) => (at % 2 ? element("code", "", part) : part)));
}

function setMode(name) {
  mode = name;
  byId("modes").querySelector(`[value=${name}]`).checked = true;
  paint();
  if (now >= 0) showTip(shown.tokens[now]);
  remember();
}

// -- a token's numbers ----------------------------------------------------------------------------------------------

function showTip(token) {
  const code = element("code");
  fill(code, token.cluster ? token.cluster.text : token.text || "∅");
  const numbers = element("dl");
  const pairs = numbersOf(token, shown.item, shown.tokens.length);
  for (const [name, value] of pairs) numbers.append(element("dt", "", name), element("dd", "", value));
  tip.replaceChildren(code, numbers);
  tip.hidden = false;
  const at = token.span.getClientRects()[0] ?? token.span.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
  return pairs;
}
function hideTip() { tip.hidden = true; }

function goToToken(direction, any) {
  if (!shown) return;
  const { tokens } = shown;
  let at = now < 0 && direction < 0 ? tokens.length : now;
  do at += direction; while (tokens[at] && !any && !tokens[at].sampled);
  if (!tokens[at]) return;
  tokens[now]?.span.classList.remove("now");
  now = at;
  const span = tokens[at].span, section = span.closest(".turn");
  if (section.classList.contains("folded")) section.querySelector(".fold").click();
  span.classList.add("now");
  span.scrollIntoView({ block: "nearest" });
  byId("said").textContent = `${tokens[at].text} ${showTip(tokens[at]).map((pair) => pair.join(" ")).join(", ")}`;
}

// -- everything together --------------------------------------------------------------------------------------------

function refilter() {
  const { wanted, words } = filter();
  for (const name of FIELDS) form.elements[name].classList.toggle("on", wanted[name] !== "");
  const all = lines.length === RUN.trajectories ? "" : `, ${(RUN.trajectories - lines.length).toLocaleString("en")} to load`;
  const part = words.length && !searchedAll() ? ", searching…" : "";
  byId("found").textContent = (found.length === lines.length ? count(lines.length, "trajectory", "trajectories") : `${found.length.toLocaleString("en")} of ${count(lines.length, "trajectory", "trajectories")}`) + all + part;
  byId("clear").hidden = FIELDS.every((name) => wanted[name] === "");
  if (words.length && !searchedAll()) readTexts(refilter).catch((error) => { byId("found").textContent = error.message; });
  drawList();
  remember();
}

function step(by) {
  if (!found.length) return;
  const at = found.indexOf(selected);
  open(found[at < 0 ? (by > 0 ? 0 : found.length - 1) : Math.max(0, Math.min(found.length - 1, at + by))]);
}

function stepInGroup(by) {
  if (!selected) return;
  const members = groupOf(selected), at = members.indexOf(selected) + by;
  if (members[at]) open(members[at]);
}

function toggleKeys(show) {
  byId("keys").hidden = !show;
  byId("keys-button").setAttribute("aria-expanded", String(show));
}

const KEYS = {
  j: () => step(1), k: () => step(-1), "]": () => stepInGroup(1), "[": () => stepInGroup(-1),
  "/": () => byId("q").select(), "?": () => toggleKeys(byId("keys").hidden),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target, typing = target.matches("input:not([type=radio]), select");
  if (event.key === "Escape") {
    if (typing) target.blur();
    toggleKeys(false);
    hideTip();
    return;
  }
  if (typing) return;
  let act = KEYS[event.key];
  if (event.key >= "1" && event.key <= "5") act = () => setMode(MODES[event.key - 1][0]);
  const arrow = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (arrow && !target.matches("input")) act = () => goToToken(arrow, event.shiftKey);
  if (target === list) {
    const jump = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (jump) act = () => step(jump);
  }
  if (act) { event.preventDefault(); act(); }
}

// The address says what is shown: it can be kept, and given to somebody else.
let started = false;
function remember() {
  if (!started) return;
  const said = new URLSearchParams();
  if (selected) said.set("trajectory", selected.lease);
  if (mode !== "mask") said.set("colour", mode);
  for (const [name, value] of Object.entries(filtersOf())) if (value) said.set(name, value);
  history.replaceState(null, "", `#${said}`);
}

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const name of FIELDS) {
    const field = form.elements[name], value = said.get(name) ?? "";
    if (field.tagName === "SELECT" && value && ![...field.options].some((option) => option.value === value)) {
      const option = element("option", "", value);
      option.value = value;
      field.append(option);
    }
    field.value = value;
  }
  if (MODES.some(([name]) => name === said.get("colour"))) mode = said.get("colour");
  return Number(said.get("trajectory") ?? RUN.start ?? NaN);
}

async function start() {
  byId("run").textContent = RUN.run;
  document.title = `${RUN.run}: trajectories`;
  const parts = [count(RUN.trajectories, "trajectory", "trajectories"), count(RUN.steps, "step"), count(RUN.sampled, "sampled token")];
  if (RUN.unreadable) parts.push(`${RUN.unreadable} could not be read`);
  if (RUN.replayed) parts.push(`learner's numbers ${RUN.replayed}`);
  byId("totals").textContent = parts.join(" · ");
  for (const [at, [name, label]] of MODES.entries()) {
    const made = element("label"), input = element("input");
    Object.assign(input, { type: "radio", name: "colour", value: name, checked: name === mode, title: `key ${at + 1}` });
    input.onchange = () => setMode(name);
    made.append(input, element("span", "", label));
    byId("modes").append(made);
  }
  const wanted = recall();
  setMode(mode);
  if (!RUN.trajectories) complain("No trajectory was delivered in this run.");
  for (let file = 0; file < RUN.files; file++) {
    try { addLines(await load("list", file)); } catch (error) { complain(error.message); return; }
    choices("outcome", (line) => [line.outcome]);
    choices("fate", (line) => [line.fate]);
    choices("tool", (line) => (line.tools.length ? line.tools : ["(none)"]));
    refilter();
    const line = lines.find((each) => each.lease === wanted);
    if (!selected && (line || Number.isNaN(wanted)) && found.length) open(line ?? found[0]);
  }
  started = true;
  refilter();
  if (!selected && RUN.trajectories) complain(Number.isNaN(wanted) ? "No trajectory passes the filters." : `There is no trajectory ${wanted} in this view.`);
  document.documentElement.dataset.ready = "yes";
}

form.addEventListener("input", refilter);
form.addEventListener("submit", (event) => event.preventDefault());
byId("clear").onclick = () => { form.reset(); refilter(); byId("q").focus(); };
byId("keys-button").onclick = () => toggleKeys(byId("keys").hidden);
byId("previous").onclick = () => step(-1);
byId("next").onclick = () => step(1);
list.addEventListener("scroll", drawList, { passive: true });
list.addEventListener("click", (event) => { const row = event.target.closest(".row"); if (row) open(row.line, { scroll: false }); });
stream.addEventListener("mouseover", (event) => { const span = event.target.closest(".t"); if (span) showTip(span.token); });
stream.addEventListener("mouseleave", hideTip);
main.addEventListener("scroll", hideTip, { passive: true });
addEventListener("resize", drawList);
addEventListener("keydown", onKey);
addEventListener("hashchange", () => {
  const wanted = recall(), line = lines.find((each) => each.lease === wanted);
  refilter();
  setMode(mode);
  if (line && line !== selected) open(line);
});
start();
