// The live page: takes server-sent events, and shows data as text, never as markup.
"use strict";

const EVENTS_SHOWN = 300;
const CHART_HEIGHT = 180;
const CHART_SPANS = [20, 60, 120, 300];
const BAD = new Set([
  "trainer_lost", "ranks_lost", "failed", "host_silent", "ram_unavailable", "left_unfinished", "peers_unavailable", "protection_late",
  "recovery_failed", "preservation_failed", "durable_unreadable", "events_lost", "given_up", "copy_failed", "fenced", "command_ended",
]);
const SVG = "http://www.w3.org/2000/svg";
const part = (id) => document.getElementById(id);
const shown = new Map();
let view = null;
let events = [];
let held = [];
let isPaused = false;

function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// Calls `draw` only if its data has changed, so that a screen reader's place and the focus stay.
function update(id, data, draw) {
  const key = JSON.stringify(data);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  draw(part(id), data);
}

function setText(id, text) {
  update(id, text, (element) => { element.textContent = text; });
}

const number = (value) => value.toLocaleString("en");

function drawFacts(element, facts) {
  element.replaceChildren(...facts.map(([title, value]) => {
    const fact = make("div");
    fact.append(make("dt", title), make("dd", value));
    return fact;
  }));
}

function drawHosts(element, [hosts, newest]) {
  element.replaceChildren(...hosts.map((host) => {
    const card = make("li", undefined, host.problem ? "host lost" : "host");
    const name = make("div");
    name.append(make("strong", host.name));
    if (host.is_leading) name.append(make("span", "leads", "badge"));
    if (host.domain) name.append(make("span", host.domain, "badge"));
    card.append(name);
    if (host.problem) card.append(make("p", `does not answer: ${host.problem}`, "problem"));
    card.append(make("p", [host.ranks, host.memory && `${host.memory} of RAM`].filter(Boolean).join(", "), "about"));
    const list = make("ul", undefined, "steps");
    list.setAttribute("aria-label", `RAM of ${host.name}`);
    for (const hold of host.holds) {
      const chip = make("li", `step ${number(hold.step)} `, hold.step === newest ? "newest" : "");
      chip.append(make("small", hold.text));
      list.append(chip);
    }
    if (!host.holds.length) list.append(make("li", host.problem ? "unknown" : "nothing in RAM", "none"));
    card.append(list);
    return card;
  }));
  if (!hosts.length) element.append(make("li", "No agent of this run answers on this host.", "about"));
}

function drawDurable(element, steps) {
  element.replaceChildren(...steps.map((step, index) => make("li", `step ${number(step)}`, index ? "" : "newest")));
  if (!steps.length) element.append(make("li", "no checkpoint yet", "none"));
}

function drawCategories(element, categories) {
  element.replaceChildren(...categories.map((one) => {
    const line = make("li");
    line.append(make("i", undefined, `c-${one.name}`), `${one.text}: ${(100 * one.share).toFixed(1)} %, ${one.time}`);
    return line;
  }));
  part("bar").replaceChildren(...categories.map((one) => {
    const piece = make("span", undefined, `c-${one.name}`);
    piece.style.width = `${100 * one.share}%`;
    return piece;
  }));
}

function drawLines(element, lines) {
  element.replaceChildren(...lines.map((line) => make("p", line)));
}

function time(secs) {
  if (secs >= 1) return `${Number(secs.toPrecision(3))} s`;
  return `${Number((secs * 1000).toPrecision(3))} ms`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function shape(name, attributes, className) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  if (className) element.setAttribute("class", className);
  return element;
}

function label(x, y, text, anchor) {
  const element = shape("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

// Returns the next number of the series 1, 2, 4, 10, so that its half is as round.
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 4, 10].find((digit) => digit * unit >= value * (1 - 1e-9));
}

function drawChart(spans) {
  const each = spans.map((span) => span.secs / span.steps);
  if (!spans.length) return;
  const usual = (phase) => each.filter((_, index) => spans[index].phase === phase);
  const words = [["quiet", "without a checkpoint"], ["sealing", "while one is taken"], ["writing", "while one is written"]]
    .filter(([phase]) => usual(phase).length)
    .map(([phase, text]) => `${text} ${time(median(usual(phase)))}`);
  setText("chart-text", `Median step of the last five minutes: ${words.join(", ")}.`);
  const width = Math.max(280, part("chart").clientWidth);
  const left = 58, bottom = CHART_HEIGHT - 24, top = 8;
  const sorted = [...each].sort((a, b) => a - b);
  const high = roundUp(Math.max(sorted[Math.floor(0.98 * (sorted.length - 1))] * 1.1, 1e-6));
  const longest = Math.max(...spans.map((span) => span.ago_secs + span.secs));
  const whole = CHART_SPANS.find((secs) => secs >= longest) || CHART_SPANS[CHART_SPANS.length - 1];
  const x = (ago) => width - (width - left) * Math.min(ago, whole) / whole;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${CHART_HEIGHT}`, "aria-hidden": "true" });
  for (const share of [0, 0.5, 1]) {
    const y = bottom - (bottom - top) * share;
    svg.append(shape("line", { x1: left, x2: width, y1: y, y2: y }));
    svg.append(label(left - 6, y + 4, share ? time(high * share) : "0", "end"));
  }
  spans.forEach((span, index) => {
    if (span.ago_secs > whole) return;
    const height = (bottom - top) * Math.min(1, each[index] / high);
    const from = x(span.ago_secs + span.secs), to = x(span.ago_secs);
    const bar = { x: from, y: bottom - height, width: Math.max(1, to - from - 0.4), height };
    svg.append(shape("rect", bar, `p-${span.phase}`));
  });
  svg.append(label(left, CHART_HEIGHT - 6, `${whole} s ago`, "start"), label(width, CHART_HEIGHT - 6, "now", "end"));
  part("chart").replaceChildren(svg);
}

function show() {
  if (!view) return;
  document.title = `${view.headline} – ${view.run}`;
  setText("run", view.run);
  setText("headline", view.headline);
  const isBad = view.hosts.some((host) => host.problem);
  part("headline").className = isBad ? "bad" : "";
  update("facts", [
    ["step", view.step === null ? "–" : number(view.step)],
    ["goodput so far", view.goodput_text || "–"],
    ["time so far", view.wall || "–"],
    ["attempt", view.attempt ? String(view.attempt) : "–"],
    ["failures", String(view.failures)],
    ["newest durable", view.durable_text],
  ], drawFacts);
  const survives = view.survives.length ? `The run survives ${view.survives.join("; ")}.` : "";
  const isUnsure = /no lost|no checkpoint|unknown/.test(survives);
  setText("survives", [view.newest && `Newest: ${view.newest}.`, survives].filter(Boolean).join(" "));
  part("survives").className = isUnsure && view.hosts.length > 1 ? "bad" : "";
  update("hosts", [view.hosts, view.newest_step], drawHosts);
  update("durable", view.durable, drawDurable);
  update("categories", view.categories, drawCategories);
  update("failure", view.last_failure.length ? view.last_failure : ["None so far."], drawLines);
  update("problems", view.problems, (list, lines) => list.replaceChildren(...lines.map((line) => make("li", line))));
  part("problems-part").hidden = !view.problems.length;
  drawChart(view.steps);
  setText("time", `As of ${view.time}.`);
}

function eventLine(event) {
  return make("li", event.text, BAD.has(event.name) ? "bad" : "");
}

function isWanted(event) {
  return part("saves").checked || !event.is_of_saves;
}

// New lines are added at the top; the others stay as they are, so that a reader keeps its place.
function addEvents(list) {
  events.push(...list);
  events = events.slice(-EVENTS_SHOWN);
  const place = part("events");
  for (const event of list.filter(isWanted)) place.prepend(eventLine(event));
  while (place.children.length > EVENTS_SHOWN) place.lastChild.remove();
}

function redrawEvents() {
  const wanted = events.filter(isWanted).reverse();
  part("events").replaceChildren(...wanted.map(eventLine));
}

part("saves").addEventListener("change", redrawEvents);
part("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  part("pause").setAttribute("aria-pressed", String(isPaused));
  part("pause").textContent = isPaused ? "Go on" : "Pause";
  part("events").className = isPaused ? "paused" : "";
  if (!isPaused) {
    addEvents(held);
    held = [];
  }
});
window.addEventListener("resize", show);

const stream = new EventSource("/stream");
stream.addEventListener("state", (message) => {
  view = JSON.parse(message.data);
  setText("connection", "");
  show();
});
stream.addEventListener("happened", (message) => {
  const list = JSON.parse(message.data);
  if (isPaused) held = [...held, ...list].slice(-EVENTS_SHOWN);
  else addEvents(list);
});
stream.addEventListener("error", () => {
  setText("connection", "The connection to holdfast page is lost; what is shown is old. Trying again…");
});
