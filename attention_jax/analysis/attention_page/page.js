// Draws the captured attention in the JSON of this page. README.md beside this file has the schema.
// All text from the JSON reaches the page by textContent; nothing is fetched.
"use strict";

// --- the data ---

const data = JSON.parse(document.getElementById("data").textContent);

const QUANTITIES = {
  weights: { label: "weights", name: "weight" },
  logits: { label: "logits", name: "logit" },
  entropy: { label: "entropy", name: "entropy in nats" },
  dlogits: { label: "gradient of the logits", name: "gradient" },
  rollout: { label: "rollout", name: "rollout" },
};

const distinct = (values) => [...new Set(values)];
const panelNames = distinct(data.captures.map((capture) => capture.panel));
const stepNames = distinct(data.captures.map((capture) => capture.step));
const exampleNames = distinct(data.captures.map((capture) => capture.example));
const available = Object.keys(QUANTITIES).filter((name) =>
  data.captures.some((capture) => capture.attentions.some((each) => name in each.arrays)));

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// An IEEE half-precision number from its 16 bits.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

const decoded = new WeakMap();

function numbersOf(array) {
  if (!decoded.has(array)) {
    let numbers;
    if (array.values) {
      numbers = Float32Array.from(array.values, (value) => (value === null ? NaN : value));
    } else if (array.dtype === "float32") {
      numbers = new Float32Array(bytesOf(array.data).buffer);
    } else {
      const words = new Uint16Array(bytesOf(array.data).buffer);
      numbers = Float32Array.from(words, (word) => half(word) * array.scale);
    }
    decoded.set(array, numbers);
  }
  return decoded.get(array);
}

// One head of one attention, with one quantity: numbers by (query, key).
class Table {
  constructor(attention, quantity, head) {
    const array = attention.arrays[quantity];
    this.queries = attention.query_tokens;
    this.keys = attention.key_tokens;
    this.quantity = quantity;
    this.perQuery = quantity === "entropy";
    const size = this.queries.length * (this.perQuery ? 1 : this.keys.length);
    const first = Math.min(head, array.shape[0] - 1) * size;
    this.numbers = numbersOf(array).subarray(first, first + size);
    this.range = rangeOf(attention, quantity);
    this.mask = attention.mask && numbersOfMask(attention.mask);
    this.maskStart = attention.mask
      ? Math.min(head, attention.mask.shape[0] - 1) * this.queries.length * this.keys.length : 0;
  }

  at(i, j) {
    return this.numbers[this.perQuery ? i : i * this.keys.length + j];
  }

  masked(i, j) {
    return this.mask !== null && !this.mask[this.maskStart + i * this.keys.length + j];
  }

  // The place of a number in the range of the colours, from 0 to 1.
  share(number) {
    const [low, high] = this.range;
    return Math.min(Math.max((number - low) / (high - low), 0), 1);
  }

  // How strong a line is, from 0 to 1.
  strength(i, j) {
    if (this.masked(i, j) || Number.isNaN(this.at(i, j))) return 0;
    return this.quantity === "dlogits"
      ? Math.abs(this.at(i, j)) / this.range[1] : this.share(this.at(i, j));
  }
}

function numbersOfMask(mask) {
  if (!decoded.has(mask)) {
    const bytes = bytesOf(mask.data);
    const count = mask.shape.reduce((product, size) => product * size, 1);
    decoded.set(mask, Uint8Array.from({ length: count }, (_, n) => (bytes[n >> 3] >> (n & 7)) & 1));
  }
  return decoded.get(mask);
}

const ranges = new WeakMap();

function rangeOf(attention, quantity) {
  const array = attention.arrays[quantity];
  if (quantity === "weights" || quantity === "rollout") return [0, 1];
  if (quantity === "entropy") return [0, Math.max(Math.log(attention.key_tokens.length), 1e-6)];
  if (!ranges.has(array)) {
    let low = Infinity, high = -Infinity;
    for (const number of numbersOf(array)) {
      if (!Number.isFinite(number)) continue;
      if (number < low) low = number;
      if (number > high) high = number;
    }
    if (quantity === "dlogits") {
      high = Math.max(Math.abs(low), Math.abs(high));
      low = -high;
    }
    ranges.set(array, low < high && Number.isFinite(high - low) ? [low, high] : [low - 1, low + 1]);
  }
  const [low, high] = ranges.get(array);
  return Number.isFinite(low) && Number.isFinite(high) ? [low, high] : [-1, 1];
}

// --- colours and text ---

const rgb = (text) => text.split(" ").map((color) =>
  [0, 2, 4].map((start) => parseInt(color.slice(start, start + 2), 16)));
const VIRIDIS = rgb("440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80"
  + " 3fbc73 5ec962 84d44b addc30 d8e219 fde725");
const DIVERGING = rgb("053061 2065ab 4393c3 90c4dd d1e5f0 f7f6f6 fddbc7 f3a481 d6604d b1182b"
  + " 67001f");

function colorAt(quantity, share) {
  const stops = quantity === "dlogits" ? DIVERGING : VIRIDIS;
  const place = share * (stops.length - 1), below = Math.min(Math.floor(place), stops.length - 2);
  return stops[below].map((low, channel) =>
    Math.round(low + (place - below) * (stops[below + 1][channel] - low)));
}

const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function formatted(number) {
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  const text = size === 0 ? "0" : size >= 0.001 && size < 100000
    ? String(Number(number.toPrecision(4))) : number.toExponential(3);
  return text.replaceAll("-", "−");
}

// White space that would leave no trace, made visible. The mark of sentencepiece where a word begins
// is as wide as a letter, and in a rotated label it would look like a line.
function visible(token) {
  if (token === "") return "(empty)";
  const marked = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("▁", "_");
  return marked.trim() === "" ? marked.replaceAll(" ", "␣") : marked;
}

function element(tag, parent, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// A context that draws in CSS pixels, on a canvas with the resolution of the screen.
function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

// The table as an image with one pixel per pair; masked pairs are grey, with diagonals if hatched.
function pixels(table, hatched) {
  const rows = table.queries.length, columns = table.keys.length;
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const greys = rgb(`${themed("--masked").slice(1)} ${themed("--hatch").slice(1)}`);
  const colors = Array.from({ length: 256 }, (_, n) => colorAt(table.quantity, n / 255));
  const broken = [255, 0, 255];  // NaN
  for (let i = 0, place = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++, place += 4) {
      const number = table.at(i, j);
      const color = table.masked(i, j) ? greys[hatched && (i + j) % 4 === 0 ? 1 : 0]
        : Number.isNaN(number) ? broken : colors[Math.round(255 * table.share(number))];
      image.data[place] = color[0];
      image.data[place + 1] = color[1];
      image.data[place + 2] = color[2];
      image.data[place + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function drawTable(context, table, width, height) {
  context.imageSmoothingEnabled = table.keys.length > width || table.queries.length > height;
  const cell = width / table.keys.length;
  const coarse = cell >= 4 && table.keys.length <= 128;
  context.drawImage(pixels(table, !coarse), 0, 0, width, height);
  if (!table.mask || !coarse) return;
  context.fillStyle = hatching(context);
  for (let i = 0; i < table.queries.length; i++) {
    for (let j = 0; j < table.keys.length; j++) {
      if (table.masked(i, j)) context.fillRect(j * cell, i * cell, cell, cell);
    }
  }
}

// Diagonal lines, as a pattern that can be filled in.
function hatching(context) {
  const tile = document.createElement("canvas");
  const pen = sized(tile, 6, 6);
  pen.strokeStyle = themed("--hatch");
  pen.lineWidth = 1.2;
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  const scale = window.devicePixelRatio || 1;
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

const ruler = document.createElement("canvas").getContext("2d");

// The width of the longest token in pixels, up to a limit.
function widthOf(tokens, size, most) {
  ruler.font = `${size}px system-ui, sans-serif`;
  let longest = 0;
  for (const token of tokens) {
    longest = Math.max(longest, ruler.measureText(visible(token)).width);
  }
  return Math.min(Math.ceil(longest), most);
}

// --- what is shown: one state for all panels, so that they stay linked ---

const state = {
  example: exampleNames[0],
  step: stepNames[stepNames.length - 1],
  quantity: available[0],
  attention: data.captures[0].attentions[data.captures[0].attentions.length - 1].name,
  head: 0,
  sorted: false,
  focus: null,  // {side: "queries" or "keys", index, other: an index on the other side or null}
  pinned: false,
};

const otherSide = (side) => (side === "queries" ? "keys" : "queries");

// The query and the key of a focus; null for the one that it does not have.
function pairOf({ side, index, other }) {
  return side === "queries" ? [index, other] : [other, index];
}

const same = (first, second) => JSON.stringify(first) === JSON.stringify(second);

function setFocus(focus) {
  if (same(focus, state.focus)) return;
  state.focus = focus;
  for (const panel of panels) panel.showFocus();
}

// The pointer is over a token or a pair: nothing changes while another is pinned.
function hover(focus) {
  if (!state.pinned) setFocus(focus);
}

function pin(focus) {
  state.pinned = !(state.pinned && same(focus, state.focus));
  setFocus(focus);
  for (const panel of panels) panel.showReadout();
}

function clear() {
  state.pinned = false;
  setFocus(null);
}

function drawAll() {
  for (const panel of panels) panel.draw();
}

function moveOf(event) {
  return { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
}

// --- one panel: the attention of one model, or of one run ---

class Panel {
  constructor(parent, name) {
    this.name = name;
    this.root = element("section", parent, "panel");
    this.root.setAttribute("aria-label", name || data.title);
    if (panelNames.length > 1) element("h2", this.root, "", name);
    this.absent = element("p", this.root, "absent", "This step or example was not captured here.");
    this.content = element("div", this.root);
    this.grid = element("div", this.content, "grid");
    this.readout = element("p", this.content, "readout");
    this.readout.setAttribute("aria-live", "polite");
    this.views = element("div", this.content, "views");
    this.lines = new Lines(this, element("div", this.views));
    this.bars = new Bars(this, element("div", this.views, "bars"));
    this.matrix = new Matrix(this, element("div", this.views));
  }

  draw() {
    this.capture = data.captures.find((capture) => capture.panel === this.name
      && capture.step === state.step && capture.example === state.example);
    const attentions = this.capture ? this.capture.attentions : [];
    this.attention = attentions.find((each) => each.name === state.attention) || attentions[0];
    this.absent.hidden = Boolean(this.attention);
    this.content.hidden = !this.attention;
    if (!this.attention) {
      this.table = null;
      return;
    }
    this.table = this.tableOf(this.attention, state.head);
    this.linesTable = this.table.perQuery && "weights" in this.attention.arrays
      ? new Table(this.attention, "weights", state.head) : this.table;
    this.drawGrid(attentions);
    this.lines.draw();
    this.matrix.draw();
    this.showFocus();
  }

  // The quantity of the page, or the first that this attention has.
  tableOf(attention, head) {
    const quantity = state.quantity in attention.arrays
      ? state.quantity : Object.keys(QUANTITIES).find((each) => each in attention.arrays);
    return new Table(attention, quantity, head);
  }

  drawGrid(attentions) {
    const focused = document.activeElement;
    const place = this.grid.contains(focused) ? focused.dataset.place : null;
    this.grid.replaceChildren();
    const headsOf = (attention) => Math.max(
      ...Object.values(attention.arrays).map((array) => array.shape[0]));
    const heads = Math.max(...attentions.map(headsOf));
    if (heads * attentions.length === 1) return;
    const table = element("table", this.grid);
    if (heads > 1) {
      const row = element("tr", element("thead", table));
      element("th", row, "", "head");
      for (let head = 0; head < heads; head++) element("th", row, "", String(head));
    }
    const body = element("tbody", table);
    const size = heads > 8 ? 44 : 56;
    for (const [layer, attention] of attentions.entries()) {
      const row = element("tr", body);
      element("th", row, "", attention.name);
      for (let head = 0; head < headsOf(attention); head++) {
        const button = element("button", element("td", row));
        const selected = attention === this.attention && head === state.head;
        button.type = "button";
        button.dataset.place = `${layer},${head}`;
        button.setAttribute("aria-label", `${attention.name}, head ${head}`);
        button.setAttribute("aria-pressed", String(selected));
        button.addEventListener("click", () => {
          state.attention = attention.name;
          state.head = head;
          drawAll();
        });
        const longest = Math.max(attention.query_tokens.length, attention.key_tokens.length);
        const cell = Math.max(size / longest, 0.01);
        const width = cell * attention.key_tokens.length;
        const height = cell * attention.query_tokens.length;
        const thumbnail = this.tableOf(attention, head);
        drawTable(sized(element("canvas", button), width, height), thumbnail, width, height);
      }
    }
    table.addEventListener("keydown", (event) => {
      const move = moveOf(event);
      if (!move || !event.target.dataset.place) return;
      const [layer, head] = event.target.dataset.place.split(",").map(Number);
      const next = table.querySelector(`[data-place="${layer + move[0]},${head + move[1]}"]`);
      if (next) next.focus();
      event.preventDefault();
    });
    if (place) table.querySelector(`[data-place="${place}"]`)?.focus();
  }

  // The focus, if these tokens exist in this panel.
  get focus() {
    if (!this.table || !state.focus) return null;
    const { side, index, other } = state.focus;
    if (index >= this.table[side].length) return null;
    const exists = other !== null && other < this.table[otherSide(side)].length;
    return { side, index, other: exists ? other : null };
  }

  showFocus() {
    if (!this.table) return;
    this.lines.showFocus();
    this.matrix.showFocus();
    this.bars.showFocus();
    this.showReadout();
  }

  showReadout() {
    const { table, focus } = this;
    if (!table) return;
    const called = (side, index) =>
      `${visible(table[side][index])} (${side === "queries" ? "query" : "key"} ${index})`;
    const { label, name } = QUANTITIES[table.quantity];
    const head = table.quantity === "rollout" ? "all heads" : `head ${state.head}`;
    let text = `${this.attention.name}, ${head}: ${label}`;
    if (focus && focus.other !== null) {
      const [i, j] = pairOf(focus);
      const number = table.masked(i, j) ? "masked" : `${name} ${formatted(table.at(i, j))}`;
      text = `${called("queries", i)} → ${called("keys", j)}: ${number}`;
    } else if (focus) {
      text = focus.side === "queries" ? `What ${called("queries", focus.index)} attends to`
        : `What attends to ${called("keys", focus.index)}`;
    }
    this.readout.textContent = text + (state.focus && state.pinned ? " · pinned" : "");
  }
}

// Moves the focus with the keys of an element that shows tokens.
function listenToKeys(root, panel) {
  root.tabIndex = 0;
  root.addEventListener("keydown", (event) => {
    const move = moveOf(event);
    if (event.key === "Escape") clear();
    else if (event.key === "Enter" && state.focus) pin(state.focus);
    else if (move && panel.table) step(panel, move, root === panel.matrix.root);
    else return;
    event.preventDefault();
  });
}

// An arrow key: among the pairs of the matrix, or among the tokens of the two sides.
function step(panel, [down, right], inMatrix) {
  const { table } = panel;
  const clamp = (index, side) => Math.min(Math.max(index, 0), table[side].length - 1);
  state.pinned = false;
  const focus = panel.focus;
  if (inMatrix) {
    const start = focus || { side: "queries", index: 0, other: null };
    const [i, j] = pairOf(start);
    const first = i === null || j === null;
    setFocus({
      side: "queries",
      index: clamp((i ?? 0) + (first ? 0 : down), "queries"),
      other: clamp((j ?? 0) + (first ? 0 : right), "keys"),
    });
    return;
  }
  if (!focus) setFocus({ side: "queries", index: 0, other: null });
  else if (right) {
    const side = right > 0 ? "keys" : "queries";
    setFocus({ side, index: clamp(focus.index, side), other: null });
  } else setFocus({ side: focus.side, index: clamp(focus.index + down, focus.side), other: null });
}

function listenToPointer(root, focusAt) {
  root.addEventListener("pointermove", (event) => hover(focusAt(event)));
  root.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hover(null);
  });
  root.addEventListener("click", (event) => {
    const focus = focusAt(event);
    if (focus) pin(focus);
  });
}

// --- lines between the tokens ---

const LABEL = 120, GAP = 100, MOST_LABELS = 96;

class Lines {
  constructor(panel, parent) {
    this.panel = panel;
    element("h3", parent, "", "Lines from queries to keys");
    this.root = element("div", parent, "lines");
    this.root.setAttribute("role", "application");
    this.root.setAttribute("aria-label", "Lines between queries and keys; arrow keys move");
    this.canvas = element("canvas", this.root);
    this.sides = {
      queries: element("div", this.root, "side queries"),
      keys: element("div", this.root, "side keys"),
    };
    listenToKeys(this.root, panel);
    listenToPointer(this.root, (event) => this.focusAt(event));
  }

  draw() {
    const { table } = this.panel;
    const longest = Math.max(table.queries.length, table.keys.length);
    this.all = longest <= MOST_LABELS;
    this.step = longest <= 36 ? 22 : this.all ? 16 : 720 / longest;
    this.height = Math.max(this.step * longest, 22);
    this.root.style.width = `${2 * LABEL + GAP}px`;
    this.root.style.height = `${this.height}px`;
    this.context = sized(this.canvas, GAP, this.height);
    this.canvas.style.left = `${LABEL}px`;
    for (const [side, root] of Object.entries(this.sides)) {
      root.style.width = `${LABEL}px`;
      root.style.height = `${this.height}px`;
      root.style[side === "queries" ? "left" : "right"] = "0px";
    }
    this.labels = null;
  }

  // Labels of all tokens, or of those given by side where there is no room for all.
  label(shown) {
    if (this.all && this.labels) return;
    this.labels = { queries: new Map(), keys: new Map() };
    const height = this.all ? this.step : 18;
    for (const [side, root] of Object.entries(this.sides)) {
      root.replaceChildren();
      const tokens = this.panel.table[side];
      const indices = this.all ? tokens.keys() : this.apart(shown[side], 18);
      for (const index of indices) {
        const label = element("span", root, "token", visible(tokens[index]));
        label.title = tokens[index];
        label.dir = "auto";
        label.dataset.index = index;
        label.style.height = label.style.lineHeight = `${height}px`;
        label.style.fontSize = `${Math.min(14, height - 4)}px`;
        label.style.maxWidth = `${LABEL}px`;
        const top = (index + 0.5) * this.step - height / 2;
        label.style.top = `${Math.min(Math.max(top, 0), this.height - height)}px`;
        this.labels[side].set(index, label);
      }
    }
  }

  // The first of the tokens that leave room for each other.
  apart(indices, height) {
    const kept = [];
    for (const index of indices) {
      if (kept.every((other) => Math.abs(other - index) * this.step >= height)) kept.push(index);
    }
    return kept;
  }

  focusAt(event) {
    const box = this.root.getBoundingClientRect();
    if (!this.panel.table) return null;
    const side = event.clientX - box.left < box.width / 2 ? "queries" : "keys";
    const index = Math.floor((event.clientY - box.top) / this.step);
    const exists = index >= 0 && index < this.panel.table[side].length;
    return exists ? { side, index, other: null } : null;
  }

  showFocus() {
    const { focus, linesTable: table } = this.panel;
    const pairs = focus ? this.pairsOf(focus) : this.strongest();
    const shown = { queries: [], keys: [] };
    if (focus) {
      const other = otherSide(focus.side);
      shown[focus.side].push(focus.index);
      if (focus.other !== null) shown[other].push(focus.other);
      const ends = pairs.filter((pair) => pair[2] > 0.02).sort((a, b) => b[2] - a[2]);
      shown[other].push(...ends.slice(0, 12).map((pair) => pair[other === "keys" ? 1 : 0]));
    } else {
      const every = Math.ceil(22 / this.step);
      for (const side of ["queries", "keys"]) {
        for (let n = 0; n < table[side].length; n += every) shown[side].push(n);
      }
    }
    this.label(shown);
    const { context } = this;
    context.clearRect(0, 0, GAP, this.height);
    const colors = [themed("--line"), themed("--negative"), themed("--positive")];
    for (const [i, j, strength] of pairs) {
      if (strength < 0.01) continue;
      const sign = table.quantity === "dlogits" ? (table.at(i, j) < 0 ? 1 : 2) : 0;
      context.strokeStyle = colors[sign];
      context.globalAlpha = (focus ? 1 : 0.6) * (0.1 + 0.9 * Math.sqrt(strength));
      context.lineWidth = 0.8 + 3.2 * strength;
      context.beginPath();
      const from = (i + 0.5) * this.step, to = (j + 0.5) * this.step;
      context.moveTo(0, from);
      context.bezierCurveTo(GAP / 2, from, GAP / 2, to, GAP, to);
      context.stroke();
    }
    this.mark(focus, pairs);
  }

  mark(focus, pairs) {
    for (const labels of Object.values(this.labels)) {
      for (const label of labels.values()) {
        label.classList.remove("focus");
        label.style.background = "";
      }
    }
    if (!focus) return;
    const other = otherSide(focus.side);
    this.labels[focus.side].get(focus.index)?.classList.add("focus");
    for (const [i, j, strength] of pairs) {
      const label = this.labels[other].get(other === "keys" ? j : i);
      const share = `${Math.round(45 * strength)}%`;
      if (label) label.style.background = `color-mix(in srgb, var(--line) ${share}, transparent)`;
    }
    if (focus.other !== null) this.labels[other].get(focus.other)?.classList.add("focus");
  }

  pairsOf({ side, index }) {
    const table = this.panel.linesTable;
    return side === "queries"
      ? table.keys.map((_, j) => [index, j, table.strength(index, j)])
      : table.queries.map((_, i) => [i, index, table.strength(i, index)]);
  }

  // Each query's strongest lines.
  strongest() {
    const table = this.panel.linesTable;
    const count = this.all ? 3 : 1;
    return table.queries.flatMap((_, i) => {
      const row = table.keys.map((_, j) => [i, j, table.strength(i, j)]);
      return row.sort((a, b) => b[2] - a[2]).slice(0, count);
    });
  }
}

// --- the matrix of one head ---

class Matrix {
  constructor(panel, parent) {
    this.panel = panel;
    this.parent = parent;
    element("h3", parent, "", "Matrix of queries (rows) and keys (columns)");
    this.root = element("div", parent, "matrix");
    this.root.setAttribute("role", "application");
    this.root.setAttribute("aria-label", "Matrix of queries and keys; arrow keys move");
    this.canvas = element("canvas", this.root);
    this.overlay = element("canvas", this.root);
    this.labels = element("div", this.root);
    this.legend = element("div", parent, "legend");
    listenToKeys(this.root, panel);
    listenToPointer(this.root, (event) => this.focusAt(event));
  }

  draw() {
    const { table } = this.panel;
    const rows = table.queries.length, columns = table.keys.length;
    this.left = 16 + widthOf(table.queries, 14, 120);
    const width = this.panel.root.clientWidth - this.left - 4;
    const { lines, bars } = this.panel;
    const beside = width - lines.root.offsetWidth - bars.root.offsetWidth - 50;
    const room = Math.min(beside >= 360 ? beside : width, 720);
    this.cell = Math.min(room / columns, 720 / rows, 34);
    this.all = this.cell >= 11;
    const labelHeight = widthOf(table.keys, 14, 120);
    this.upright = this.all && labelHeight <= this.cell - 4;
    this.top = this.upright ? 24 : 16 + labelHeight;
    const size = [this.cell * columns, this.cell * rows];
    this.root.style.width = `${this.left + size[0]}px`;
    this.root.style.height = `${this.top + size[1]}px`;
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.style.left = `${this.left}px`;
      canvas.style.top = `${this.top}px`;
    }
    drawTable(sized(this.canvas, ...size), table, ...size);
    this.context = sized(this.overlay, ...size);
    this.drawLegend(table);
    this.labelled = null;
  }

  drawLegend(table) {
    this.legend.replaceChildren();
    const [low, high] = table.range;
    element("span", this.legend, "", formatted(low));
    const context = sized(element("canvas", this.legend), 120, 10);
    for (let x = 0; x < 120; x++) {
      context.fillStyle = `rgb(${colorAt(table.quantity, x / 119)})`;
      context.fillRect(x, 0, 1.5, 10);
    }
    element("span", this.legend, "", `${formatted(high)}  ${QUANTITIES[table.quantity].name}`);
    if (table.mask) {
      element("span", this.legend, "swatch");
      element("span", this.legend, "", "masked");
    }
  }

  focusAt(event) {
    const box = this.root.getBoundingClientRect();
    if (!this.panel.table) return null;
    const { queries, keys } = this.panel.table;
    const i = Math.floor((event.clientY - box.top - this.top) / this.cell);
    const j = Math.floor((event.clientX - box.left - this.left) / this.cell);
    if (i < 0 && j >= 0 && j < keys.length) return { side: "keys", index: j, other: null };
    if (j < 0 && i >= 0 && i < queries.length) return { side: "queries", index: i, other: null };
    return i >= 0 && j >= 0 && i < queries.length && j < keys.length
      ? { side: "queries", index: i, other: j } : null;
  }

  // The shown token, and others where they leave room.
  apart(shown, count) {
    const every = Math.ceil(15 / this.cell);
    const others = [...Array(count).keys()].filter((index) => index % every === 0
      && shown.every((other) => Math.abs(other - index) >= every));
    return [...shown, ...others];
  }

  label(shown) {
    if (this.all && this.labelled) return;
    this.labels.replaceChildren();
    this.labelled = { queries: new Map(), keys: new Map() };
    const size = Math.min(14, Math.max(this.cell - 1, 11)), thickness = Math.max(this.cell, 14);
    for (const side of ["queries", "keys"]) {
      const tokens = this.panel.table[side];
      for (const index of this.all ? tokens.keys() : this.apart(shown[side], tokens.length)) {
        const label = element("span", this.labels, "token", visible(tokens[index]));
        label.title = tokens[index];
        label.style.fontSize = `${size}px`;
        const start = (index + 0.5) * this.cell - thickness / 2;
        if (side === "queries") {
          label.classList.add("row");
          label.style.left = "0px";
          label.style.width = `${this.left - 3}px`;
          label.style.top = `${this.top + start}px`;
          label.style.height = label.style.lineHeight = `${thickness}px`;
        } else {
          label.classList.add(this.upright ? "upright" : "column");
          label.style.left = `${this.left + start}px`;
          label.style.width = `${thickness}px`;
          label.style.lineHeight = `${this.upright ? this.top : thickness}px`;
          label.style.top = "0px";
          label.style.height = `${this.top - 2}px`;
        }
        this.labelled[side].set(index, label);
      }
    }
  }

  showFocus() {
    const { focus, table } = this.panel;
    const width = this.cell * table.keys.length, height = this.cell * table.queries.length;
    const [i, j] = focus ? pairOf(focus) : [null, null];
    const pair = { queries: i, keys: j };
    const present = (index) => (index === null ? [] : [index]);
    this.label({ queries: present(pair.queries), keys: present(pair.keys) });
    for (const side of ["queries", "keys"]) {
      for (const [index, label] of this.labelled[side]) {
        label.classList.toggle("focus", index === pair[side]);
      }
    }
    const { context } = this;
    context.clearRect(0, 0, width, height);
    context.lineWidth = this.cell < 6 ? 1 : 2;
    context.strokeStyle = themed("--focus");
    if (pair.queries !== null) context.strokeRect(0, pair.queries * this.cell, width, this.cell);
    if (pair.keys !== null) context.strokeRect(pair.keys * this.cell, 0, this.cell, height);
  }
}

// --- the row under the pointer: bars and numbers ---

class Bars {
  constructor(panel, parent) {
    this.panel = panel;
    this.title = element("h3", parent);
    this.root = element("div", parent, "rows");
    this.root.tabIndex = 0;
    this.root.setAttribute("role", "region");
    this.rows = [];
  }

  // The entries of the row or column in focus: [index, token, number or null if masked].
  entries(focus) {
    const { table } = this.panel;
    if (table.perQuery) return table.queries.map((token, i) => [i, token, table.at(i, 0)]);
    const number = (i, j) => (table.masked(i, j) ? null : table.at(i, j));
    return focus.side === "queries"
      ? table.keys.map((token, j) => [j, token, number(focus.index, j)])
      : table.queries.map((token, i) => [i, token, number(i, focus.index)]);
  }

  showFocus() {
    const { table } = this.panel;
    const focus = this.panel.focus || { side: "queries", index: 0, other: null };
    const token = visible(table[focus.side][focus.index]);
    const name = QUANTITIES[table.quantity].name;
    this.title.textContent = table.perQuery ? `Each query: ${name}`
      : focus.side === "queries" ? `Row of query ${focus.index}, ${token}: ${name}`
        : `Column of key ${focus.index}, ${token}: ${name}`;
    this.root.setAttribute("aria-label", this.title.textContent);
    const entries = this.entries(focus);
    if (state.sorted) entries.sort((a, b) => Math.abs(b[2] ?? 0) - Math.abs(a[2] ?? 0));
    const marked = !this.panel.focus ? null : table.perQuery ? pairOf(focus)[0] : focus.other;
    const finite = entries.map((entry) => entry[2]).filter((number) => Number.isFinite(number));
    const low = Math.min(0, table.range[0], ...finite);
    const high = Math.max(0, table.range[1], ...finite);
    while (this.rows.length < entries.length) this.rows.push(this.newRow());
    this.rows.forEach((row, n) => {
      row.root.hidden = n >= entries.length;
      row.root.style.display = row.root.hidden ? "none" : "";
      if (n < entries.length) this.fill(row, entries[n], marked, low, high);
    });
    if (marked !== null && !state.sorted) this.scrollTo(marked);
  }

  // Scrolls the rows and not the page.
  scrollTo(index) {
    const row = this.rows[index].root, { scrollTop, clientHeight } = this.root;
    const top = row.offsetTop - this.root.offsetTop, bottom = top + row.offsetHeight;
    if (top < scrollTop || bottom > scrollTop + clientHeight) {
      this.root.scrollTop = top - clientHeight / 2;
    }
  }

  newRow() {
    const root = element("div", this.root, "bar-row");
    const row = { root, position: element("span", root, "bar-position") };
    row.token = element("span", root, "bar-token");
    row.token.dir = "auto";
    row.bar = element("span", element("span", root, "bar-room"), "bar");
    row.number = element("span", root, "bar-number");
    return row;
  }

  fill(row, [index, token, number], marked, low, high) {
    const { table } = this.panel;
    row.root.dataset.index = index;
    row.root.classList.toggle("focus", index === marked);
    row.position.textContent = index;
    row.token.textContent = visible(token);
    row.number.textContent = number === null ? "masked" : formatted(number);
    row.bar.classList.toggle("masked", number === null);
    const known = Number.isFinite(number) && number !== null;
    const start = known ? (Math.min(number, 0) - low) / (high - low) : 0;
    const end = known ? (Math.max(number, 0) - low) / (high - low) : number === null ? 1 : 0;
    row.bar.style.left = `${100 * start}%`;
    row.bar.style.width = `${100 * (end - start)}%`;
    row.bar.style.background = number === null ? ""
      : table.quantity !== "dlogits" ? "var(--line)"
        : number < 0 ? "var(--negative)" : "var(--positive)";
  }
}

// --- the controls of the page ---

function choice(parent, label, names, change) {
  const root = element("label", parent, "", label);
  const select = element("select", root);
  for (const name of names) element("option", select, "", name).value = name;
  select.addEventListener("change", () => change(select.value));
  root.hidden = names.length < 2;
  return select;
}

function makeControls(parent) {
  const fields = element("fieldset", parent);
  element("legend", fields, "", "Show");
  for (const name of available) {
    const label = element("label", fields);
    const input = element("input", label);
    input.type = "radio";
    input.name = "quantity";
    input.value = name;
    input.checked = name === state.quantity;
    input.addEventListener("change", () => {
      state.quantity = name;
      drawAll();
    });
    element("span", label, "", QUANTITIES[name].label);
  }
  choice(parent, "Example", exampleNames, (name) => {
    state.example = name;
    clear();
    drawAll();
  });
  const slider = element("label", parent, "", "Step");
  slider.hidden = stepNames.length < 2;
  const range = element("input", slider);
  range.type = "range";
  range.min = 0;
  range.max = range.value = stepNames.length - 1;
  const output = element("output", slider, "", state.step);
  range.addEventListener("input", () => {
    state.step = output.textContent = stepNames[range.value];
    range.setAttribute("aria-valuetext", state.step);
    drawAll();
  });
  const sorting = element("label", parent);
  const sorted = element("input", sorting);
  sorted.type = "checkbox";
  sorted.addEventListener("change", () => {
    state.sorted = sorted.checked;
    for (const panel of panels) panel.showFocus();
  });
  element("span", sorting, "", "largest first");
}

makeControls(document.getElementById("controls"));
const panels = panelNames.map((name) => new Panel(document.getElementById("panels"), name));
drawAll();
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) drawAll();
  width = window.innerWidth;
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") clear();
});
