// What is shown: one state for all panels, so that they stay linked.

const state = {
  example: exampleNames[0],
  step: stepNames[stepNames.length - 1],
  quantity: available[0],
  attention: data.captures[0].attentions[data.captures[0].attentions.length - 1].name,
  head: 0,
  sorted: false,
  zoomed: false,
  bright: false,  // colours by the square root
  search: "",
  match: null,  // the place among the matches of the search
  focus: null,  // {side: "queries" or "keys", index, other: an index on the other side or null}
  pinned: false,
  pointed: null,  // the view under the pointer that set the focus
};
const panels = [];

const otherSide = (side) => (side === "queries" ? "keys" : "queries");

// The query and the key of a focus; null for the one that it does not have.
function pairOf({ side, index, other }) {
  return side === "queries" ? [index, other] : [other, index];
}

const same = (first, second) => JSON.stringify(first) === JSON.stringify(second);

function setFocus(focus, pointed = null) {
  if (same(focus, state.focus)) return;
  state.focus = focus;
  state.pointed = pointed;
  for (const panel of panels) panel.showFocus();
}

// The pointer is over a token or a pair: nothing changes while another is pinned.
function hover(focus, root) {
  if (!state.pinned) setFocus(focus, root);
}

function pin(focus, root) {
  state.pinned = !(state.pinned && same(focus, state.focus));
  setFocus(focus, root);
  for (const panel of panels) panel.showReadout();
}

function clear() {
  state.pinned = false;
  setFocus(null);
}

function drawAll() {
  for (const panel of panels) panel.draw();
  search.show();
}
