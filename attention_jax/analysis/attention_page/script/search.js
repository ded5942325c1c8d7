// Search in the tokens: where a text occurs in them, and going from match to match.

// In lower case, with spaces for other white space and for the marks of tokenizers.
const plain = (text) => text.replaceAll(/[\s▁Ġ]/g, " ").toLowerCase();

// The first and the last token of each place that has the text. Pieces of a text and single letters
// are joined as they are; words have a space between them.
function matchesIn(tokens, text) {
  const parts = tokens.map(plain), wanted = plain(text), starts = [], found = [];
  const pieces = parts.some((part) => part.includes(" ")) || parts.every((part) => part.length < 2);
  let joined = "";
  for (const part of parts) {
    starts.push(joined.length);
    joined += pieces ? part : `${part} `;
  }
  let place = wanted ? joined.indexOf(wanted) : -1;
  for (let first = 0; place >= 0; place = joined.indexOf(wanted, place + wanted.length)) {
    while (starts[first + 1] <= place) first++;
    let last = first;
    while (starts[last + 1] < place + wanted.length) last++;
    if (found.at(-1)?.first !== first) found.push({ first, last });
  }
  return found;
}

// The places of matches in order, those of the keys only if their tokens differ from the queries';
// and, by side, the set of all tokens that belong to a match.
function searched(table, text) {
  const matches = [], marked = { queries: new Set(), keys: new Set() };
  for (const side of ["queries", "keys"]) {
    const counts = side === "queries" || !same(table.queries, table.keys);
    for (const { first, last } of matchesIn(table[side], text)) {
      for (let index = first; index <= last; index++) marked[side].add(index);
      if (counts) matches.push({ side, index: first, other: null });
    }
  }
  return { matches, marked };
}

// The field, the number of matches, and buttons for the next and the previous match.
class Search {
  constructor(parent) {
    const root = element("fieldset", parent);
    this.field = element("input", element("label", root, "", "Find"));
    this.field.type = "search";
    this.field.setAttribute("aria-keyshortcuts", "/");
    this.buttons = [["‹", -1, "Previous match"], ["›", 1, "Next match"]].map(([sign, by, name]) => {
      const button = element("button", root, "", sign);
      button.type = "button";
      button.title = name;
      button.setAttribute("aria-label", name);
      button.addEventListener("click", () => this.go(by));
      return button;
    });
    this.count = element("output", root);
    this.field.addEventListener("input", () => this.find());
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.go(event.shiftKey ? -1 : 1);
      if (event.key !== "Escape") return;
      this.field.value = "";
      this.find();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target === this.field) return;
      this.field.select();
      event.preventDefault();
    });
  }

  // The matches of the first panel that shows something.
  get matches() {
    return panels.find((panel) => panel.table)?.matches ?? [];
  }

  find() {
    state.search = this.field.value;
    state.match = null;
    for (const panel of panels) panel.find();
    this.show();
  }

  go(by) {
    const { length } = this.matches;
    if (!length) return;
    state.match = ((state.match ?? (by > 0 ? -1 : 0)) + by + length) % length;
    state.pinned = true;
    setFocus(this.matches[state.match]);
    this.show();
  }

  show() {
    const { length } = this.matches;
    if (state.match >= length) state.match = null;
    for (const button of this.buttons) button.disabled = !length;
    this.count.textContent = !state.search ? "" : length === 0 ? "no match"
      : state.match !== null ? `${state.match + 1} of ${length}`
        : length === 1 ? "1 match" : `${length} matches`;
  }
}
