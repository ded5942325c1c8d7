// One panel: the attention of one model, or of one run.

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
    this.search();
    this.lines.draw();
    this.matrix.draw();
    this.showFocus();
  }

  search() {
    Object.assign(this, searched(this.table, state.search));
  }

  // Shows the matches of a new search.
  find() {
    if (!this.table) return;
    this.search();
    this.matrix.drawMatches();
    this.showFocus();
  }

  // The quantity of the page, or the first that this attention has.
  tableOf(attention, head) {
    const quantity = state.quantity in attention.arrays
      ? state.quantity : Object.keys(QUANTITIES).find((each) => each in attention.arrays);
    return new Table(attention, quantity, head);
  }

  drawGrid(attentions) {
    const drawn = [this.capture, state.quantity, state.bright, themed("--page")];
    if (!drawn.every((each, n) => each === this.drawn?.[n])) this.makeGrid(attentions);
    this.drawn = drawn;
    for (const button of this.grid.querySelectorAll("button")) {
      const [layer, head] = button.dataset.place.split(",").map(Number);
      const selected = attentions[layer] === this.attention && head === state.head;
      button.setAttribute("aria-pressed", String(selected));
      button.tabIndex = selected ? 0 : -1;  // Tab stops once, arrow keys move on
    }
  }

  makeGrid(attentions) {
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
        button.type = "button";
        button.dataset.place = `${layer},${head}`;
        button.setAttribute("aria-label", `${attention.name}, head ${head}`);
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
