// The row under the pointer: bars and numbers.

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
