// What is shown: one state for all panels, so that they stay linked.

const state = {
  example: exampleNames[0],
  step: stepNames[stepNames.length - 1],
  quantity: available[0],
  attention: data.captures[0].attentions[data.captures[0].attentions.length - 1].name,
  head: 0,
  sorted: false,
  focus: null,  // {side: "queries" or "keys", index, other: an index on the other side or null}
  pinned: false,
};

const otherSide = (side) => (side === "queries" ? "keys" : "queries");

// The query and the key of a focus; null for the one that it does not have.
function pairOf({ side, index, other }) {
  return side === "queries" ? [index, other] : [other, index];
}

const same = (first, second) => JSON.stringify(first) === JSON.stringify(second);

function setFocus(focus) {
  if (same(focus, state.focus)) return;
  state.focus = focus;
  for (const panel of panels) panel.showFocus();
}

// The pointer is over a token or a pair: nothing changes while another is pinned.
function hover(focus) {
  if (!state.pinned) setFocus(focus);
}

function pin(focus) {
  state.pinned = !(state.pinned && same(focus, state.focus));
  setFocus(focus);
  for (const panel of panels) panel.showReadout();
}

function clear() {
  state.pinned = false;
  setFocus(null);
}

function drawAll() {
  for (const panel of panels) panel.draw();
}
