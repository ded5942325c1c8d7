// The matrix of one head.

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
