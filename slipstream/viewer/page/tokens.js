// One trajectory's tokens: what each is, its colour, its numbers. Nothing here touches the page.
"use strict";

const PLAIN = { swatch: "" };
// A band: [from which value on, its colour, what the legend calls it]; the last whose `from` is reached.
const DIFFERENCE = [
  [-Infinity, "--m4", "under −0.3"], [-0.3, "--m3", "−0.3 … −0.1"], [-0.1, "--m2", "−0.1 … −0.03"],
  [-0.03, "--m1", "−0.03 … −0.005"], [-0.005, "--z", "±0.005"], [0.005, "--p1", "0.005 … 0.03"],
  [0.03, "--p2", "0.03 … 0.1"], [0.1, "--p3", "0.1 … 0.3"], [0.3, "--p4", "over 0.3"],
];
const ADVANTAGE = [
  [-Infinity, "--m4", "under −1.5"], [-1.5, "--m3", "−1.5 … −0.75"], [-0.75, "--m2", "−0.75 … −0.25"],
  [-0.25, "--m1", "−0.25 … 0"], [-1e-9, "--z", "0"], [1e-9, "--p1", "0 … 0.25"], [0.25, "--p2", "0.25 … 0.75"],
  [0.75, "--p3", "0.75 … 1.5"], [1.5, "--p4", "over 1.5"],
];
const PROBABILITY = [
  [-Infinity, "--s5", "under 1%"], [0.01, "--s4", "1 … 10%"], [0.1, "--s3", "10 … 50%"], [0.5, "--s2", "50 … 90%"],
  [0.9, "--s1", "90 … 99%"], [0.99, "--s0", "over 99%"],
];
const USES = {
  trained: ["--trained", "trained"], mismatch: ["--cut", "cut for mismatch"], stale: ["--old", "too old"],
  zero: ["--same", "group without signal"], failed: ["--failed", "outcome not trained on"],
  unknown: ["--unsure", "trained, or cut for mismatch (which was not recorded)"],
  waiting: ["--other", "not used yet"], heldout: ["--other", "held-out, never trained on"],
};
const MODES = [
  ["mask", "Mask"], ["difference", "Difference"], ["version", "Version"], ["advantage", "Advantage"], ["logprob", "Log-prob"],
];

function band(bands, value) {
  let found = bands[0];
  for (const each of bands) if (value >= each[0]) found = each;
  return { swatch: found[1], name: found[2], order: bands.indexOf(found) };
}

/** `line`: of the list. `item`, `texts`: as in a tokens file. Returns one record a token. */
function tokensOf(line, item, texts) {
  const tokens = [];
  let sampled = 0, run = 0, left = item.runs.length ? item.runs[0][0] : 0;
  for (let at = 0; at < item.ids.length; at++) {
    while (left === 0 && run + 1 < item.runs.length) left = item.runs[++run][0];
    left--;
    const version = item.runs.length ? item.runs[run][1] : -1;
    const token = { at, id: item.ids[at], text: texts[item.ids[at]] ?? "", version, sampled: version >= 0, cluster: null };
    if (token.sampled) {
      token.engine = number(item.engine, sampled);
      token.learner = number(item.learner, sampled);
      token.weight = number(item.weights, sampled);
      token.use = useOf(line, item, token, sampled);
      token.advantage = token.use === "trained" || token.use === "mismatch" ? item.advantage : null;
      sampled++;
    }
    tokens.push(token);
  }
  for (const [start, size, text] of item.clusters) {
    for (let at = start; at < start + size; at++) {
      tokens[at].cluster = { text, place: at - start + 1, size };
      tokens[at].text = at === start ? text : "";
    }
  }
  return tokens;
}

function number(values, index) {
  const value = values ? values[index] : null;
  return value === null || value === undefined ? null : value / RUN.scale;
}

function useOf(line, item, token, sampled) {
  if (line.heldout) return "heldout";
  const fate = item.fate;
  if (fate.zero_signal) return "zero";
  if (fate.discarded_stale) return "stale";
  if (fate.failed || line.fate.startsWith("failed")) return "failed";
  if (line.step === null) return "waiting";
  if (item.kept) {
    if (item.kept[sampled] === "1") return "trained";
    return item.learner[sampled] === null && fate.masked_stale ? "stale" : "mismatch";
  }
  if (fate.masked_stale && token.version < item.judged - RUN.cutoff) return "stale";
  return fate.masked_mismatch ? "unknown" : "trained";
}

/** The colour of a token: { swatch, name, order }; swatch "" is none. */
function colourOf(mode, token, item, newest) {
  if (!token.sampled) return PLAIN;
  if (mode === "mask") {
    const [swatch, name] = USES[token.use];
    return { swatch, name, order: Object.keys(USES).indexOf(token.use) };
  }
  if (mode === "difference") return token.learner === null || token.engine === null ? PLAIN : band(DIFFERENCE, token.learner - token.engine);
  if (mode === "advantage") return token.advantage === null ? PLAIN : band(ADVANTAGE, token.advantage);
  if (mode === "logprob") return token.engine === null ? PLAIN : band(PROBABILITY, Math.exp(token.engine));
  const age = Math.max(0, newest - token.version);
  const old = item.judged === null ? "" : age === 0 ? ", fresh" : `, ${age} old`;
  return { swatch: `--a${Math.min(7, age)}`, name: `version ${token.version}${old}`, order: -token.version };
}

function newestOf(tokens, item) {
  return item.judged ?? tokens.reduce((most, token) => Math.max(most, token.version), -1);
}

/** Why a mode has nothing to show of this trajectory, or "". */
function lacking(mode, line, item) {
  if ((mode !== "difference" && mode !== "advantage") || item.learner) return "";
  const what = mode === "difference" ? "The learner's log-probs" : "The advantage";
  if (line.heldout) return `${what}: none, this was an evaluation. Tokens stay grey.`;
  if (item.fate.zero_signal) return `${what}: none. The rewards of its group were all equal, so the learner passed it over.`;
  if (line.fate === "not used yet") return `${what}: none yet, the learner has not used it.`;
  if (line.step === null || !item.fate.trained) return `${what}: none, no token of it was trained on.`;
  return `${what} of this trajectory were not recorded by the run.`.replace("advantage of this trajectory were", "advantage of this trajectory was") +
    " `slipstream view RUN --replay` computes them again.";
}

function signed(value, digits) {
  if (value === null || value === undefined) return "–";
  return (value < 0 ? "−" : value > 0 ? "+" : "") + Math.abs(value).toFixed(digits);
}
function minus(value, digits) { return value < 0 ? "−" + (-value).toFixed(digits) : value.toFixed(digits); }
function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 99.995 ? "100%" : value >= 10 ? value.toFixed(1) + "%" : value >= 0.01 ? value.toFixed(2) + "%" : "<0.01%";
}

/** [name, value] pairs that hover shows. */
function numbersOf(token, item, count) {
  const rows = [["token", `id ${token.id}, ${(token.at + 1).toLocaleString("en")} of ${count.toLocaleString("en")}`]];
  if (token.cluster) rows.push(["character", `token ${token.cluster.place} of ${token.cluster.size} that make it`]);
  if (!token.sampled) return [...rows, ["sampled", "no: never trained on"]];
  const age = item.judged === null ? null : Math.max(0, item.judged - token.version);
  rows.push(["version", age === null ? `${token.version}` : `${token.version} (staleness ${age})`]);
  rows.push(["engine log-prob", token.engine === null ? "not finite" : `${minus(token.engine, 4)} (${percent(token.engine)})`]);
  if (token.learner === null) rows.push(["learner log-prob", "not recorded"]);
  else {
    rows.push(["learner log-prob", `${minus(token.learner, 4)} (${percent(token.learner)})`]);
    if (token.engine !== null) {
      rows.push(["difference", signed(token.learner - token.engine, 4)]);
      rows.push(["ratio", Math.exp(token.learner - token.engine).toFixed(4)]);
    }
  }
  rows.push(["advantage", token.advantage === null ? "none recorded" : signed(token.advantage, 4)]);
  if (token.weight !== null) rows.push(["weight", token.weight.toFixed(4)]);
  rows.push(["fate", USES[token.use][1]]);
  return rows;
}
