// Draws the charts and the sample browser from the JSON in #data. Text of the run enters the page as text nodes only.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

// -- charts

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SERIES = 7;
const series = (index) => color(`--series-${index % SERIES}`);

function translucent(hex) {
  const [red, green, blue] = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, 0.16)`;
}

// Plotly takes a name for HTML of its own.
const escaped = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function lineTraces(chart) {
  const mode = chart.x.length < 3 ? "lines+markers" : "lines";
  let index = 0;
  return chart.traces.flatMap((trace) => {
    if (trace.upper) {
      const edge = { x: chart.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", name: escaped(trace.name), legendgroup: trace.name };
      return [
        { ...edge, y: trace.y, showlegend: false },
        { ...edge, y: trace.upper, fill: "tonexty", fillcolor: translucent(series(0)) },
      ];
    }
    const own = series(index++);
    const isExtreme = chart.traces.some((other) => other.upper) && index > 1;
    const line = isExtreme ? { width: 1, color: series(SERIES - 1), dash: trace.name === "min" ? "dot" : "dash" } : { width: 1.8, color: own };
    return [{ x: chart.x, y: trace.y, name: escaped(trace.name), mode, line }];
  });
}

function stackedTraces(chart) {
  return chart.traces.map((trace, index) => {
    const own = trace.name === "other" ? series(SERIES - 1) : series(index);
    const drawn = { x: chart.x, y: trace.y.map((value) => value ?? 0), name: escaped(trace.name) };
    if (chart.kind === "bars") return { ...drawn, type: "bar", width: 0.5, marker: { color: own } };
    return { ...drawn, mode: "lines", stackgroup: "all", line: { width: 0.5, color: own } };
  });
}

function layout(chart) {
  const axis = { gridcolor: color("--line"), zeroline: false, linecolor: color("--line") };
  return {
    margin: { l: 52, r: 8, t: 8, b: chart.traces.length > 1 ? 52 : 30 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--soft") },
    hovermode: "x unified",
    hoverlabel: { bgcolor: color("--raised"), bordercolor: color("--line"), font: { color: color("--ink") } },
    showlegend: chart.traces.length > 1,
    barmode: "stack",
    legend: { orientation: "h", traceorder: "normal", x: 0, y: 0, yref: "container", yanchor: "bottom" },
    xaxis: { ...axis, showgrid: false, tickformat: "d" },
    yaxis: { ...axis, ...(chart.log ? { type: "log", exponentformat: "power", dtick: 1 } : { exponentformat: "e" }) },
  };
}

const plots = data.charts.map((chart) => {
  const plot = element("div", { class: "plot" });
  const caption = element("figcaption", {}, element("b", {}, chart.title), ` ${chart.unit}`, element("br", {}), chart.note);
  document.getElementById("charts").append(element("figure", { class: chart.wide ? "chart wide" : "chart" }, caption, plot));
  return { chart, plot };
});

function drawCharts() {
  for (const { chart, plot } of plots) {
    const traces = chart.kind === "lines" ? lineTraces(chart) : stackedTraces(chart);
    Plotly.react(plot, traces, layout(chart), { responsive: true, displaylogo: false, displayModeBar: false });
  }
}

drawCharts();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);

// -- samples

const byId = (id) => document.getElementById(id);
const shown = (value) => (value === null ? "none" : String(Math.round(value * 1e4) / 1e4));

function withMarks(text, query) {
  const parts = document.createDocumentFragment();
  const searched = text.toLowerCase();
  let from = 0;
  // Lower case may differ in length for a few letters; then nothing is marked.
  while (query && searched.length === text.length) {
    const at = searched.indexOf(query, from);
    if (at < 0) break;
    parts.append(text.slice(from, at), element("mark", {}, text.slice(at, at + query.length)));
    from = at + query.length;
  }
  parts.append(text.slice(from));
  return parts;
}

function facts(sample) {
  const versions = sample.versions.map(([version, tokens]) => (sample.versions.length > 1 ? `${version} (${tokens} tokens)` : `${version}`));
  const rows = [
    ["Reward", shown(sample.reward)],
    ...Object.entries(sample.parts).map(([name, value]) => [name, shown(value)]),
    ["Length", sample.length === null ? "" : `${sample.length} tokens`],
    ["Finish", sample.finish_reason ?? ""],
    ["Version", versions.join(", ")],
    ["Source", sample.data_source],
    ["Prompt", `#${sample.prompt_index}`],
  ];
  return element("dl", { class: "facts" }, ...rows.filter(([, value]) => value !== "").map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function browse() {
  let matching = [];
  let current = 0;

  const query = () => byId("search").value.toLowerCase();
  const limit = (id, otherwise) => (byId(id).value === "" ? otherwise : Number(byId(id).value));

  function isMatch(sample) {
    const limited = byId("reward-min").value !== "" || byId("reward-max").value !== "";
    if (limited && (sample.reward === null || sample.reward < limit("reward-min", -Infinity) || sample.reward > limit("reward-max", Infinity))) return false;
    return [sample.prompt, sample.response ?? "", sample.ground_truth].some((text) => text.toLowerCase().includes(query()));
  }

  function filter() {
    matching = data.dumps[byId("dump").value].samples.filter(isMatch);
    byId("list").replaceChildren(...matching.map((sample, index) => {
      const start = element("span", { class: "start" }, (sample.error ?? sample.response).slice(0, 120));
      const button = element("button", { type: "button" }, element("span", { class: "reward" }, shown(sample.reward)), start);
      button.addEventListener("click", () => show(index));
      return element("li", {}, button);
    }));
    show(0);
  }

  function text(title, value) {
    return [element("h3", {}, title), element("pre", {}, withMarks(value, query()))];
  }

  function show(index) {
    current = index;
    byId("position").value = matching.length ? `${index + 1} of ${matching.length}` : "no match";
    byId("previous").disabled = index <= 0;
    byId("next").disabled = index >= matching.length - 1;
    [...byId("list").children].forEach((item, at) => item.firstChild.setAttribute("aria-current", String(at === index)));
    const sample = matching[index];
    if (!sample) return byId("sample").replaceChildren(element("p", { class: "remark" }, "No sample of this step matches."));
    const item = byId("list").children[index];
    byId("list").scrollTop = Math.min(Math.max(byId("list").scrollTop, item.offsetTop + item.offsetHeight - byId("list").clientHeight), item.offsetTop);
    byId("sample").replaceChildren(
      facts(sample),
      ...(sample.error === null ? [] : [element("p", { class: "error" }, `Not scored: ${sample.error}`)]),
      ...text("Prompt", sample.prompt),
      ...(sample.response === null ? [] : text("Response", sample.response)),
      ...text("Ground truth", sample.ground_truth),
    );
  }

  const move = (by) => current + by >= 0 && current + by < matching.length && show(current + by);
  data.dumps.forEach((dump, index) => byId("dump").append(element("option", { value: index }, `${dump.step}`)));
  byId("dump").value = data.dumps.length - 1;
  byId("filters").addEventListener("input", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  document.addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
  filter();
}

if (data.dumps.length) browse();
