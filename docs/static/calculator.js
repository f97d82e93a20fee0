// The calculator of docs/calculator.md: bytes of rows, from measured bytes of a row.
"use strict";

// State floats of a row of dim D: [of D, constant]; docs/generate.py checks them.
const STATE = {
  "SGD": [0, 0],
  "Adagrad, rowwise": [0, 1],
  "Adagrad": [1, 0],
  "RowwiseAdam": [1, 1],
  "Adam": [2, 0],
  "FTRL": [2, 0],
};
const OVERHEAD = 41; // measured: 34 to 41 bytes of header, index and recency
const BASE = 160e6; // a server without rows
const MARGIN = 1.1; // a hash spreads ids evenly, and not exactly
const ROWS_PER_CORE = { 16: 4.2e6, 64: 1.8e6 }; // lookups and updates over TCP, one request at a time

function bytesOfRow(dim, weightBytes, optimizer, extra) {
  const [slope, constant] = STATE[optimizer];
  return dim * weightBytes + 4 * (slope * dim + constant) + OVERHEAD + extra;
}

function rowsPerCore(dim) {
  // Between the two measured dims, and beyond: by the time of a row, which grows with D.
  const at = (d) => 1 / ROWS_PER_CORE[d];
  const time = at(16) + ((at(64) - at(16)) * (dim - 16)) / 48;
  return 1 / Math.max(time, at(16) / 2);
}

function shown(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${bytes.toPrecision(3)} ${units[unit]}`;
}

const FIELDS = [
  ["ids", "Rows of all tables, in millions", 100, 0.001],
  ["dim", "Dim D", 16, 1],
  ["servers", "Embedding servers", 2, 1],
  ["batch", "Unique ids a step, of all trainers", 20000, 1],
  ["steps", "Steps a second", 50, 0.1],
];

function build(root) {
  const form = document.createElement("form");
  for (const [name, label, value, min] of FIELDS) {
    form.insertAdjacentHTML(
      "beforeend",
      `<label>${label}<input name="${name}" type="number" value="${value}" min="${min}" step="any"></label>`
    );
  }
  const choices = Object.keys(STATE).map((o) => `<option${o === "Adagrad" ? " selected" : ""}>${o}</option>`);
  form.insertAdjacentHTML("beforeend", `<label>Optimizer<select name="optimizer">${choices.join("")}</select></label>`);
  form.insertAdjacentHTML(
    "beforeend",
    '<label>Weights<select name="dtype"><option value="4">fp32</option><option value="2">fp16, bf16</option></select></label>' +
      '<label class="check"><input name="lfu" type="checkbox"> eviction=lfu</label>' +
      '<label class="check"><input name="metadata" type="checkbox"> keeps_metadata, expiry</label>'
  );
  const result = document.createElement("output");
  root.append(form, result);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => update(form, result));
  update(form, result);
}

function update(form, result) {
  const value = (name) => Number(form.elements[name].value);
  // LFU counts in the metadata: both together take no more.
  const extra = form.elements.lfu.checked || form.elements.metadata.checked ? 16 : 0;
  const row = bytesOfRow(value("dim"), value("dtype"), form.elements.optimizer.value, extra);
  const rows = value("ids") * 1e6;
  const servers = Math.max(1, Math.floor(value("servers")));
  const cores = (value("batch") * value("steps")) / rowsPerCore(value("dim"));
  const lines = [
    ["A row", `${Math.round(row)} bytes`],
    ["All rows", shown(rows * row)],
    ["Memory of each server", shown((rows / servers) * row * MARGIN + BASE)],
    ["capacity of each server", `${Math.round((rows / servers) * MARGIN).toLocaleString("en")} rows`],
    ["Cores of all servers, at least", Math.max(servers, Math.ceil(cores)).toLocaleString("en")],
  ];
  result.innerHTML = `<table>${lines.map(([a, b]) => `<tr><th>${a}</th><td>${b}</td></tr>`).join("")}</table>`;
}

document.addEventListener("DOMContentLoaded", () => {
  const root = document.getElementById("calculator");
  if (root) build(root);
});
