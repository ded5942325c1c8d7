// The matrix of one head.

const LARGE_CELL = 14;

class Matrix {
  constructor(panel, parent) {
    this.panel = panel;
    element("h3", parent, "", "Matrix of queries (rows) and keys (columns)");
    this.scroller = element("div", parent);
    this.root = element("div", this.scroller, "matrix");
    this.root.setAttribute("role", "application");
    this.root.setAttribute("aria-label", "Matrix of queries and keys; arrow keys move");
    this.canvas = element("canvas", this.root);
    // The labels above and at the left stay in sight when the matrix is scrolled.
    this.strips = {
      keys: element("div", this.root, "strip above"),
      queries: element("div", this.root, "strip beside"),
    };
    this.corner = element("div", this.strips.keys, "strip corner");
    this.labels = {}, this.ticks = {}, this.outlines = {};
    for (const side of ["queries", "keys"]) {
      this.labels[side] = element("div", this.strips[side]);
      this.ticks[side] = element("div", this.strips[side]);
      this.outlines[side] = element("div", this.root, "outline");
    }
    this.legend = element("div", parent, "legend");
    listenToKeys(this.root, panel, (down, right) => this.next(down, right));
    listenToPointer(this.root, (event) => this.focusAt(event));
  }

  draw() {
    const { table } = this.panel;
    const rows = table.queries.length, columns = table.keys.length;
    this.left = 16 + widthOf(table.queries, 14, 120);
    const width = this.panel.root.clientWidth - this.left - 4;
    const { lines, bars } = this.panel;
    const beside = width - lines.scroller.offsetWidth - bars.root.offsetWidth - 70;
    const room = Math.min(beside >= 360 ? beside : width, 720);
    const zoomed = state.zoomed && Math.max(rows, columns) > MOST_LABELS;
    this.cell = zoomed ? LARGE_CELL : Math.min(room / columns, 720 / rows, 34);
    this.all = this.cell >= 11;
    const labelHeight = widthOf(table.keys, 14, 120);
    this.upright = this.all && labelHeight <= this.cell - 4;
    this.top = this.upright ? 24 : 16 + labelHeight;
    const size = [this.cell * columns, this.cell * rows];
    this.scroller.classList.toggle("scroller", zoomed);
    this.scroller.style.maxWidth = zoomed ? `${this.left + room}px` : "";
    place(this.root, null, null, this.left + size[0], this.top + size[1]);
    place(this.canvas, this.left, this.top);
    place(this.strips.keys, null, null, this.left + size[0], this.top);
    place(this.strips.queries, null, null, this.left, size[1]);
    place(this.corner, null, null, this.left, this.top);
    this.canvas.classList.toggle("pixels", zoomed);
    if (zoomed) {
      const image = pixels(table, true);
      [this.canvas.width, this.canvas.height] = [columns, rows];
      place(this.canvas, this.left, this.top, ...size);
      this.canvas.getContext("2d").drawImage(image, 0, 0);
    } else drawTable(sized(this.canvas, ...size), table, ...size);
    this.drawLegend(table);
    this.drawMatches();
    this.labelled = null;
  }

  // A tick beside each row and above each column of a token that the search has found.
  drawMatches() {
    const { cell, left, top } = this, size = Math.max(cell - 4, 1.5);
    for (const side of ["queries", "keys"]) {
      this.ticks[side].replaceChildren();
      for (const index of this.panel.marked[side]) {
        const start = (index + 0.5) * cell - size / 2;
        const tick = element("div", this.ticks[side], "tick");
        if (side === "queries") place(tick, left - 4, start, 4, size);
        else place(tick, left + start, top - 4, size, 4);
      }
    }
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

  // An arrow key moves among the pairs.
  next(down, right) {
    const { focus, table } = this.panel;
    const [i, j] = focus ? pairOf(focus) : [null, null];
    const moves = i !== null && j !== null;  // else it completes the pair
    return {
      side: "queries",
      index: within((i ?? 0) + (moves ? down : 0), table.queries.length),
      other: within((j ?? 0) + (moves ? right : 0), table.keys.length),
    };
  }

  focusAt(event) {
    if (!this.panel.table) return null;
    const { queries, keys } = this.panel.table, { scroller } = this;
    const box = scroller.getBoundingClientRect();
    const x = event.clientX - box.left - this.left, y = event.clientY - box.top - this.top;
    const i = y < 0 ? -1 : Math.floor((y + scroller.scrollTop) / this.cell);
    const j = x < 0 ? -1 : Math.floor((x + scroller.scrollLeft) / this.cell);
    if (i < 0 && j >= 0 && j < keys.length) return { side: "keys", index: j, other: null };
    if (j < 0 && i >= 0 && i < queries.length) return { side: "queries", index: i, other: null };
    return i >= 0 && j >= 0 && i < queries.length && j < keys.length
      ? { side: "queries", index: i, other: j } : null;
  }

  // Labels of all tokens, or of the pair, of matches and of others, as far as there is room.
  label(pair) {
    if (this.all && this.labelled) return;
    this.labelled = { queries: new Map(), keys: new Map() };
    const size = Math.min(14, Math.max(this.cell - 1, 11)), thickness = Math.max(this.cell, 14);
    for (const side of ["queries", "keys"]) {
      const tokens = this.panel.table[side];
      this.labels[side].replaceChildren();
      const present = [pair[side], ...this.panel.marked[side], ...tokens.keys()];
      const shown = apart(present.slice(pair[side] === null ? 1 : 0), 15 / this.cell);
      for (const index of this.all ? tokens.keys() : shown) {
        const label = element("span", this.labels[side], "token", visible(tokens[index]));
        label.title = tokens[index];
        label.style.fontSize = `${size}px`;
        const start = (index + 0.5) * this.cell - thickness / 2;
        if (side === "queries") {
          label.classList.add("row");
          place(label, 0, start, this.left - 4, thickness);
          label.style.lineHeight = `${thickness}px`;
        } else {
          label.classList.add(this.upright ? "upright" : "column");
          place(label, this.left + start, 0, thickness, this.top - 3);
          label.style.lineHeight = `${this.upright ? this.top : thickness}px`;
        }
        this.labelled[side].set(index, label);
      }
    }
  }

  showFocus() {
    const { focus, marked } = this.panel, { cell, left, top, scroller } = this;
    const [i, j] = focus ? pairOf(focus) : [null, null];
    const pair = { queries: i, keys: j };
    this.label(pair);
    for (const side of ["queries", "keys"]) {
      this.outlines[side].hidden = pair[side] === null;
      for (const [index, label] of this.labelled[side]) {
        label.classList.toggle("focus", index === pair[side]);
        label.classList.toggle("match", marked[side].has(index));
      }
    }
    const { table } = this.panel;
    for (const outline of Object.values(this.outlines)) {
      outline.style.borderWidth = cell < 6 ? "1px" : "2px";
    }
    place(this.outlines.queries, left, top + i * cell, cell * table.keys.length, cell);
    place(this.outlines.keys, left + j * cell, top, cell, cell * table.queries.length);
    if (!focus || state.pointed === this.root) return;
    if (i !== null) reveal(scroller, top + i * cell, cell, top);
    if (j !== null) reveal(scroller, left + j * cell, cell, left, true);
  }
}
