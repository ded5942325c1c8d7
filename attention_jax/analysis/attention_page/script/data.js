// The data of the page, and its numbers by (query, key).
// All text from the JSON reaches the page by textContent; nothing is fetched.
"use strict";

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
const longestText = Math.max(...data.captures.flatMap(({ attentions }) => attentions)
  .flatMap((attention) => [attention.query_tokens.length, attention.key_tokens.length]));
const available = Object.keys(QUANTITIES).filter((name) =>
  data.captures.some((capture) => capture.attentions.some((each) => name in each.arrays)));

function bytesOf({ bytes, data }) {
  if (bytes) return bytes;
  const text = atob(data), made = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) made[n] = text.charCodeAt(n);
  return made;
}

// Decompresses an array, which then has `bytes` in place of `data`.
async function inflate(array) {
  const stream = new Blob([bytesOf(array)]).stream();
  const inflated = new Response(stream.pipeThrough(new DecompressionStream(array.compression)));
  array.bytes = new Uint8Array(await inflated.arrayBuffer());
  array.data = null;
}

// An IEEE half-precision number from its 16 bits.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => half(bits));
const decoded = new WeakMap();

function numbersOf(array) {
  if (!decoded.has(array)) {
    let numbers;
    if (array.values) {
      numbers = Float32Array.from(array.values, (value) => (value === null ? NaN : value));
    } else if (array.dtype === "float32") {
      numbers = new Float32Array(bytesOf(array).buffer);
    } else {
      const words = new Uint16Array(bytesOf(array).buffer);
      numbers = new Float32Array(words.length);
      for (let n = 0; n < words.length; n++) numbers[n] = HALVES[words[n]] * array.scale;
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

  // The place of a number in the range, from 0 to 1.
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
    const bytes = bytesOf(mask);
    const bits = new Uint8Array(mask.shape.reduce((product, size) => product * size, 1));
    for (let n = 0; n < bits.length; n++) bits[n] = (bytes[n >> 3] >> (n & 7)) & 1;
    decoded.set(mask, bits);
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
