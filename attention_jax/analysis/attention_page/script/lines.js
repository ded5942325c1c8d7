// The lines between the tokens.

const LABEL = 120, GAP = 100, MOST_LABELS = 96, MOST_HEIGHT = 720;

class Lines {
  constructor(panel, parent) {
    this.panel = panel;
    element("h3", parent, "", "Lines from queries to keys");
    this.scroller = element("div", parent);
    this.root = element("div", this.scroller, "lines");
    this.root.setAttribute("role", "application");
    this.root.setAttribute("aria-label", "Lines between queries and keys; arrow keys move");
    this.canvas = element("canvas", this.root);
    this.sides = {
      queries: element("div", this.root, "side queries"),
      keys: element("div", this.root, "side keys"),
    };
    listenToKeys(this.root, panel, (down, right) => this.next(down, right));
    listenToPointer(this.root, (event) => this.focusAt(event));
  }

  draw() {
    const { table } = this.panel;
    const longest = Math.max(table.queries.length, table.keys.length);
    const few = longest <= MOST_LABELS;
    this.all = few || state.zoomed;
    this.scroller.classList.toggle("scroller", !few && state.zoomed);
    this.step = longest <= 36 ? 22 : this.all ? 16 : MOST_HEIGHT / longest;
    this.height = Math.max(this.step * longest, 22);
    place(this.root, null, null, 2 * LABEL + GAP, this.height);
    this.context = sized(this.canvas, GAP, this.height);
    place(this.canvas, LABEL, 0);
    place(this.sides.queries, 0, 0, LABEL, this.height);
    place(this.sides.keys, LABEL + GAP, 0, LABEL, this.height);
    this.labels = this.strong = null;
  }

  // An arrow key moves among the tokens of a side, or to the other side.
  next(down, right) {
    const { focus, table } = this.panel;
    if (!focus) return { side: "queries", index: 0, other: null };
    const side = right > 0 ? "keys" : right < 0 ? "queries" : focus.side;
    return { side, index: within(focus.index + down, table[side].length), other: null };
  }

  // Labels of all tokens, or of those given by side where there is no room for all.
  label(shown) {
    if (this.all && this.labels) return;
    this.labels = { queries: new Map(), keys: new Map() };
    const height = this.all ? this.step : 18;
    for (const [side, root] of Object.entries(this.sides)) {
      root.replaceChildren();
      const tokens = this.panel.table[side];
      const indices = this.all ? tokens.keys() : apart(shown[side], 20 / this.step);
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
      for (const side of ["queries", "keys"]) {
        shown[side].push(...this.panel.marked[side], ...table[side].keys());
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
    this.drawMatches();
    this.mark(focus, pairs);
    if (focus && state.pointed !== this.root) {
      reveal(this.scroller, focus.index * this.step, this.step);
    }
  }

  // A tick at the end of each line of a token that the search has found.
  drawMatches() {
    const { context, panel, step } = this, size = Math.max(step - 4, 1.5);
    context.globalAlpha = 1;
    context.fillStyle = themed("--match");
    for (const side of ["queries", "keys"]) {
      for (const index of panel.marked[side]) {
        context.fillRect(side === "queries" ? 0 : GAP - 5, (index + 0.5) * step - size / 2, 5, size);
      }
    }
  }

  mark(focus, pairs) {
    for (const [side, labels] of Object.entries(this.labels)) {
      for (const [index, label] of labels) {
        label.classList.remove("focus");
        label.classList.toggle("match", this.panel.marked[side].has(index));
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

  // Each query's strongest lines, found once.
  strongest() {
    const table = this.panel.linesTable;
    const count = this.all ? 3 : 1;
    this.strong ??= table.queries.flatMap((_, i) => {
      const strongest = [];
      for (let j = 0; j < table.keys.length; j++) {
        const strength = table.strength(i, j);
        if (strongest.length === count && strength <= strongest.at(-1)[2]) continue;
        strongest.push([i, j, strength]);
        strongest.sort((a, b) => b[2] - a[2]).splice(count);
      }
      return strongest;
    });
    return this.strong;
  }
}
