// The run's trajectories: data files, loaded as scripts when they are needed; filters; the list as far as it is seen.

const lines = [];            // all of the run that are here, in the order of delivery
const texts = [];            // by file: what the search looks into
const pages = new Map();     // by number: tokens files, the newest few
const waiting = new Map();   // by file name: who waits for it
const HELD = 24, ROW = 56;
let found = [];              // lines that pass the filters, in order
let selected = null;         // a line

globalThis.slipstream = {
  take(kind, index, value) {
    const settle = waiting.get(fileOf(kind, index));
    if (settle) settle(value);
  },
};
function fileOf(kind, index) { return `${kind}-${String(index).padStart(5, "0")}.js`; }

function load(kind, index) {
  const name = fileOf(kind, index);
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = name;
    waiting.set(name, (value) => { waiting.delete(name); script.remove(); resolve(value); });
    script.onerror = () => { waiting.delete(name); script.remove(); reject(new Error(`${name} is missing: make the view again`)); };
    document.head.append(script);
  });
}

async function pageOf(index) {
  let page = pages.get(index);
  if (!page) {
    page = load("tokens", index);
    page.catch(() => pages.delete(index));
  }
  pages.delete(index);
  pages.set(index, page);  // the newest last
  if (pages.size > HELD) pages.delete(pages.keys().next().value);
  return page;
}

function addLines(columns) {
  const names = Object.keys(columns), many = columns.lease.length;
  for (let at = 0; at < many; at++) {
    const line = { index: lines.length };
    for (const name of names) line[name] = columns[name][at];
    lines.push(line);
  }
}

// -- filters ------------------------------------------------------------------------------------------------------

const form = document.getElementById("filters");
const FIELDS = ["q", "outcome", "fate", "tool", "task", "reward-from", "reward-to", "step-from", "step-to", "stale-from", "stale-to", "order"];

function filtersOf() {
  return Object.fromEntries(FIELDS.map((name) => [name, form.elements[name].value.trim()]));
}

function passes(line, wanted, words) {
  if (wanted.outcome && line.outcome !== wanted.outcome) return false;
  if (wanted.fate && line.fate !== wanted.fate) return false;
  if (wanted.tool && !(wanted.tool === "(none)" ? line.tools.length === 0 : line.tools.includes(wanted.tool))) return false;
  if (wanted.task && !line.task.toLowerCase().includes(wanted.task.toLowerCase())) return false;
  for (const name of ["reward", "step", "stale"]) {
    const from = wanted[`${name}-from`], to = wanted[`${name}-to`];
    if (from !== "" && !(line[name] !== null && line[name] >= Number(from))) return false;
    if (to !== "" && !(line[name] !== null && line[name] <= Number(to))) return false;
  }
  return words.every((word) => word === `#${line.lease}` || textOf(line).includes(word));
}

function textOf(line) {
  const file = texts[Math.floor(line.index / RUN.lines)];
  if (file) return file[line.index % RUN.lines];
  return `${line.task}\n${line.question}\n${line.answer}`.toLowerCase();
}

let reading = null;
/** Everything that the search looks into, once somebody searches. */
function readTexts(then) {
  reading ??= (async () => {
    for (let file = 0; file < RUN.files; file++) {
      texts[file] = (await load("text", file)).map((text) => text.toLowerCase());
      then();
    }
  })();
  return reading;
}
function searchedAll() { return texts.length === RUN.files; }

function filter() {
  const wanted = filtersOf();
  const words = wanted.q.toLowerCase().split(/\s+/).filter(Boolean);
  found = lines.filter((line) => passes(line, wanted, words));
  const [, down, name] = /^(-?)(\w*)$/.exec(wanted.order) ?? ["", "", ""];
  if (name) {
    const sign = down ? -1 : 1;
    const value = (line) => line[name] ?? null;
    found.sort((a, b) => {  // what has no value stands last
      const x = value(a), y = value(b);
      return (x === null) - (y === null) || sign * (x - y) || a.index - b.index;
    });
  }
  return { wanted, words };
}

function choices(name, values) {
  const counts = new Map();
  for (const line of lines) for (const value of values(line)) counts.set(value, (counts.get(value) ?? 0) + 1);
  const select = form.elements[name], before = select.value;
  const option = (value, label) => { const made = document.createElement("option"); made.value = value; made.textContent = label; return made; };
  const sorted = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  select.replaceChildren(option("", "any"), ...sorted.map(([value, count]) => option(value, `${value} (${count.toLocaleString("en")})`)));
  if (before && !counts.has(before)) select.append(option(before, `${before} (0)`));
  select.value = before;
}

// -- the list, of which only what is seen is in the page ------------------------------------------------------------

const list = document.getElementById("list"), rows = document.getElementById("rows");

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function rewardOf(value) {
  const kind = value === null ? "" : value >= 1 ? " good" : value <= 0 ? " bad" : " mid";
  const text = value === null ? "–" : Number.isInteger(value) ? minus(value, 0) : minus(value, 2);
  return element("span", `reward${kind}`, text);
}

function count(number, one, many) { return `${number.toLocaleString("en")} ${number === 1 ? one : many ?? one + "s"}`; }

function metaOf(line) {
  const said = [line.outcome.replaceAll("_", " ")];
  if (line.step !== null) said.push(`step ${line.step}`);
  if (line.fate !== "trained") said.push(line.fate);
  said.push(count(line.turns, "turn"));
  if (line.calls) said.push(count(line.calls, "call") + (line.errors ? `, ${count(line.errors, "error")}` : ""));
  if (line.stale) said.push(`${line.stale} old`);
  return said.join(" · ");
}

function drawList() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 6);
  const last = Math.min(found.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 6);
  rows.style.height = `${found.length * ROW}px`;
  const made = [];
  for (let at = first; at < last; at++) {
    const line = found[at], row = element("div", "row");
    row.id = `row-${line.lease}`;
    row.style.top = `${at * ROW}px`;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(line === selected));
    row.setAttribute("aria-posinset", at + 1);
    row.setAttribute("aria-setsize", found.length);
    row.line = line;
    const asks = element("span", "asks", line.question || line.task);
    row.append(rewardOf(line.reward), asks, element("span", "number", `#${line.lease}`), element("span", "meta", metaOf(line)));
    made.push(row);
  }
  rows.replaceChildren(...made);
  const seen = selected && document.getElementById(`row-${selected.lease}`);
  if (seen) list.setAttribute("aria-activedescendant", seen.id); else list.removeAttribute("aria-activedescendant");
}

function bringIntoView(line) {
  const at = found.indexOf(line);
  if (at < 0) return;
  if (at * ROW < list.scrollTop) list.scrollTop = at * ROW;
  else if ((at + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * ROW - list.clientHeight;
}
