// Colours, text, and tables as images.

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
