// Moving the focus: with the keyboard and with the pointer.

// The rows down and the columns right that an arrow key moves by; undefined for another key.
function moveOf(event) {
  return { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
}

// Moves the focus with the keys of an element that shows tokens.
function listenToKeys(root, panel) {
  root.tabIndex = 0;
  root.addEventListener("keydown", (event) => {
    const move = moveOf(event);
    if (event.key === "Escape") clear();
    else if (event.key === "Enter" && state.focus) pin(state.focus);
    else if (move && panel.table) step(panel, move, root === panel.matrix.root);
    else return;
    event.preventDefault();
  });
}

// An arrow key: among the pairs of the matrix, or among the tokens of the two sides.
function step(panel, [down, right], inMatrix) {
  const { table } = panel;
  const clamp = (index, side) => Math.min(Math.max(index, 0), table[side].length - 1);
  state.pinned = false;
  const focus = panel.focus;
  if (inMatrix) {
    const start = focus || { side: "queries", index: 0, other: null };
    const [i, j] = pairOf(start);
    const first = i === null || j === null;
    setFocus({
      side: "queries",
      index: clamp((i ?? 0) + (first ? 0 : down), "queries"),
      other: clamp((j ?? 0) + (first ? 0 : right), "keys"),
    });
    return;
  }
  if (!focus) setFocus({ side: "queries", index: 0, other: null });
  else if (right) {
    const side = right > 0 ? "keys" : "queries";
    setFocus({ side, index: clamp(focus.index, side), other: null });
  } else setFocus({ side: focus.side, index: clamp(focus.index + down, focus.side), other: null });
}

function listenToPointer(root, focusAt) {
  root.addEventListener("pointermove", (event) => hover(focusAt(event)));
  root.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hover(null);
  });
  root.addEventListener("click", (event) => {
    const focus = focusAt(event);
    if (focus) pin(focus);
  });
}
