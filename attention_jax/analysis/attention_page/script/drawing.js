// Colours, text, and tables as images.

const rgb = (text) => text.split(" ").map((color) =>
  [0, 2, 4].map((start) => parseInt(color.slice(start, start + 2), 16)));
const VIRIDIS = rgb("440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80"
  + " 3fbc73 5ec962 84d44b addc30 d8e219 fde725");
const DIVERGING = rgb("053061 2065ab 4393c3 90c4dd d1e5f0 f7f6f6 fddbc7 f3a481 d6604d b1182b"
  + " 67001f");

function colorAt(quantity, share) {
  if (state.bright && (quantity === "weights" || quantity === "rollout")) share = Math.sqrt(share);
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

// The first of the indices that leave a distance between each other.
function apart(indices, distance) {
  const kept = [];
  for (const index of indices) {
    if (kept.every((other) => Math.abs(other - index) >= distance)) kept.push(index);
  }
  return kept;
}

function element(tag, parent, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Lengths in pixels; null leaves one to the style sheet.
function place(root, left, top, width = null, height = null) {
  for (const [name, length] of Object.entries({ left, top, width, height })) {
    if (length !== null) root.style[name] = `${length}px`;
  }
}

// Browsers draw no canvas that is longer than this.
const MOST_PIXELS = 16384;

// A context that draws in CSS pixels, on a canvas with the resolution of the screen.
function sized(canvas, width, height) {
  const scale = Math.min(window.devicePixelRatio || 1, MOST_PIXELS / Math.max(width, height));
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  place(canvas, null, null, width, height);
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
  const colors = Array.from({ length: 256 }, (_, n) => colorAt(table.quantity, n / 255));
  colors.push(...rgb(`${themed("--masked").slice(1)} ${themed("--hatch").slice(1)} ff00ff`));
  const [MASKED, HATCH, NAN] = [256, 257, 258];
  const words = (bytes) => new Uint32Array(bytes.buffer);  // four bytes of a pixel as one number
  const palette = words(Uint8Array.from(colors.flatMap((color) => [...color, 255])));
  const image = new ImageData(columns, rows), shown = words(image.data);
  for (let i = 0, place = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++, place++) {
      const number = table.at(i, j);
      shown[place] = palette[
        table.masked(i, j) ? (hatched && (i + j) % 4 === 0 ? HATCH : MASKED)
          : Number.isNaN(number) ? NAN : Math.round(255 * table.share(number))];
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function drawTable(context, table, width, height) {
  context.imageSmoothingEnabled = table.keys.length > width || table.queries.length > height;
  const cell = width / table.keys.length;
  const coarse = cell >= 4 && table.keys.length <= 128;
  context.drawImage(pixels(table, !coarse && cell >= 2), 0, 0, width, height);
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
