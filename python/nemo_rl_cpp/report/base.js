"use strict";
// What all scripts of the page use: elements, numbers, the data blocks, what survives a reload, files to save.

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// a name that may be broken behind its slashes, dots and underscores
function breakable(name) {
  return make("code", "", ...name.split(/(?<=[_/.])(?=\w)/).flatMap((part, i) => (i ? [make("wbr"), part] : [part])));
}

function escapeHtml(text) {
  return String(text).replace(/[&<>"']/g, (c) => "&#" + c.charCodeAt(0) + ";");
}

// the same short numbers as svg.format_number
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  for (const [limit, unit, by] of [[1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]])
    if (Math.abs(value) >= limit) return String(Number((value / by).toPrecision(3))) + unit;
  if (value !== 0 && Math.abs(value) < 1e-3) return String(Number(value.toPrecision(3))).replace(/^(-?)0\.0*.*$/, () => value.toExponential(2).replace(/\.?0+e/, "e"));
  return String(Number(value.toPrecision(4)));
}

async function unpack(id) {
  const block = document.getElementById(id);
  if (!block) return null;
  const bytes = Uint8Array.from(atob(block.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// the reader's place and choices, which outlive a reload; a browser that keeps nothing keeps nothing
const memory = {
  key: "nemo_rl_cpp " + location.pathname,
  values: {},
  load() {
    try { this.values = JSON.parse(sessionStorage.getItem(this.key)) || {}; } catch { this.values = {}; }
  },
  save() {
    try { sessionStorage.setItem(this.key, JSON.stringify(this.values)); } catch { /* private windows may refuse */ }
  },
};
memory.load();

function saveFile(name, content, type) {
  const link = make("a"), address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.href = address;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function fileName(text) {
  return text.replace(/[^\w.-]+/g, "_").replace(/^_+|_+$/g, "") || "report";
}

// the points of a metric of a run: {x, y} and, for a thinned curve, means; null where the run has none
function pointsOf(run, metric) {
  const entry = run.metrics[metric];
  if (!entry) return null;
  const x = run.axes[entry[0]], y = Array.isArray(entry[1]) ? entry[1] : x.map(() => entry[1]);
  return { x, y, means: entry.length > 2 ? { x: run.axes[entry[2]], y: entry[3] } : null };
}
