// The row under the pointer: bars and numbers.

const MOST_ROWS = 60;

class Bars {
  constructor(panel, parent) {
    this.panel = panel;
    this.title = element("h3", parent);
    this.root = element("div", parent, "rows");
    this.root.setAttribute("role", "listbox");
    this.list = element("div", this.root, "list");
    this.rows = [this.newRow()];
    this.order = [];
    this.root.addEventListener("scroll", () => this.fillRows());
    listenToKeys(this.root, panel, (down) => this.next(down));
    this.root.addEventListener("click", (event) => {
      const row = event.target.closest(".bar-row");
      if (row) pin(this.focusOn(Number(row.dataset.index)));
    });
  }

  // The query or the key whose row or column is shown: the first query if there is no focus.
  get focus() {
    return this.panel.focus || { side: "queries", index: 0, other: null };
  }

  // In pixels; a row has no height before the page is laid out.
  get rowHeight() {
    return this.rows[0].root.getBoundingClientRect().height || 21;
  }

  // The focus on an entry of the list.
  focusOn(index) {
    return this.panel.table.perQuery ? { side: "queries", index, other: null }
      : { ...this.focus, other: index };
  }

  // The index of the entry in focus, or null.
  get marked() {
    const { focus, table } = this.panel;
    return !focus ? null : table.perQuery ? pairOf(focus)[0] : focus.other;
  }

  // An arrow key moves through the list in its order.
  next(down) {
    const start = this.order.indexOf(this.marked);
    return this.focusOn(this.order[within(start < 0 ? 0 : start + down, this.order.length)]);
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
    const { table } = this.panel, { focus, marked } = this;
    const token = visible(table[focus.side][focus.index]);
    const name = QUANTITIES[table.quantity].name;
    this.title.textContent = table.perQuery ? `Each query: ${name}`
      : focus.side === "queries" ? `Row of query ${focus.index}, ${token}: ${name}`
        : `Column of key ${focus.index}, ${token}: ${name}`;
    this.root.setAttribute("aria-label", this.title.textContent);
    const entries = this.entries(focus);
    if (state.sorted) entries.sort((a, b) => Math.abs(b[2] ?? 0) - Math.abs(a[2] ?? 0));
    this.order = entries.map(([index]) => index);
    this.shown = entries;
    const finite = entries.map((entry) => entry[2]).filter((number) => Number.isFinite(number));
    this.low = Math.min(0, table.range[0], ...finite);
    this.high = Math.max(0, table.range[1], ...finite);
    const height = this.rowHeight;
    place(this.list, null, null, null, height * entries.length);
    const row = [state.sorted, table, focus.side, focus.index];
    if (state.sorted && !row.every((each, n) => each === this.row?.[n])) this.root.scrollTop = 0;
    this.row = row;
    if (marked !== null) reveal(this.root, height * this.order.indexOf(marked), height);
    this.fillRows();
  }

  // Fills the rows that are in sight, and some before and behind them.
  fillRows() {
    if (!this.panel.table) return;
    const { shown, marked } = this, count = Math.min(shown.length, MOST_ROWS);
    const height = this.rowHeight;
    const start = Math.floor(this.root.scrollTop / height) - Math.floor(MOST_ROWS / 3);
    const first = within(start, shown.length - count + 1);
    this.list.style.paddingTop = `${first * height}px`;
    this.root.removeAttribute("aria-activedescendant");
    while (this.rows.length < count) this.rows.push(this.newRow());
    this.rows.forEach((row, n) => {
      row.root.hidden = n >= count;
      if (n >= count) return;
      this.fill(row, shown[first + n], marked);
      row.root.setAttribute("aria-posinset", first + n + 1);
      row.root.setAttribute("aria-setsize", shown.length);
      if (shown[first + n][0] === marked) {
        this.root.setAttribute("aria-activedescendant", row.root.id);
      }
    });
  }

  newRow() {
    const root = element("div", this.list, "bar-row");
    root.setAttribute("role", "option");
    root.id = `bar-${panelNames.indexOf(this.panel.name)}-${this.list.children.length}`;
    const row = { root, position: element("span", root, "bar-position") };
    row.token = element("span", root, "bar-token");
    row.token.dir = "auto";
    row.bar = element("span", element("span", root, "bar-room"), "bar");
    row.number = element("span", root, "bar-number");
    return row;
  }

  fill(row, [index, token, number], marked) {
    const { panel: { table }, low, high } = this;
    row.root.dataset.index = index;
    row.root.classList.toggle("focus", index === marked);
    row.root.setAttribute("aria-selected", String(index === marked));
    const side = table.perQuery || this.focus.side === "keys" ? "queries" : "keys";
    row.root.classList.toggle("match", this.panel.marked[side].has(index));
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
