// Moving the focus: with the keyboard and with the pointer.

// The rows down and the columns right that a key moves by; undefined for another key.
function moveOf(event) {
  return {
    ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
    PageUp: [-16, 0], PageDown: [16, 0], Home: [-Infinity, 0], End: [Infinity, 0],
  }[event.key];
}

const within = (index, length) => Math.min(Math.max(index, 0), length - 1);

// Moves the focus with the keys of a view; `next(down, right)` is where a move leads.
function listenToKeys(root, panel, next) {
  root.tabIndex = 0;
  root.addEventListener("keydown", (event) => {
    const move = moveOf(event);
    if (event.key === "Escape") clear();
    else if (event.key === "Enter" && state.focus) pin(state.focus);
    else if (move && panel.table) {
      state.pinned = false;
      setFocus(next(...move));
    } else return;
    event.preventDefault();
  });
}

function listenToPointer(root, focusAt) {
  root.addEventListener("pointermove", (event) => hover(focusAt(event), root));
  root.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hover(null);
  });
  root.addEventListener("click", (event) => {
    const focus = focusAt(event);
    if (focus) pin(focus, root);
  });
}

// Scrolls a view, and not the page, until a stretch is in sight; labels cover the view's start.
function reveal(root, start, size, covered = 0, across = false) {
  const [place, room] = across ? ["scrollLeft", root.clientWidth] : ["scrollTop", root.clientHeight];
  if (start < root[place] + covered || start + size > root[place] + room) {
    root[place] = start - (room + covered) / 2;
  }
}
