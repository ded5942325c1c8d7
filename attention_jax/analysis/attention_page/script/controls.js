// The controls of the page.

function option(parent, text, change) {
  const root = element("label", parent);
  const box = element("input", root);
  box.type = "checkbox";
  box.addEventListener("change", () => change(box.checked));
  element("span", root, "", text);
  return root;
}

function choice(parent, label, names, change) {
  const root = element("label", parent, "", label);
  const select = element("select", root);
  for (const name of names) element("option", select, "", name).value = name;
  select.addEventListener("change", () => change(select.value));
  root.hidden = names.length < 2;
  return select;
}

// Returns the search.
function makeControls(parent) {
  const fields = element("fieldset", parent);
  element("legend", fields, "", "Show");
  for (const name of available) {
    const label = element("label", fields);
    const input = element("input", label);
    input.type = "radio";
    input.name = "quantity";
    input.value = name;
    input.checked = name === state.quantity;
    input.addEventListener("change", () => {
      state.quantity = name;
      drawAll();
    });
    element("span", label, "", QUANTITIES[name].label);
  }
  choice(parent, "Example", exampleNames, (name) => {
    state.example = name;
    clear();
    drawAll();
  });
  const slider = element("label", parent, "", "Step");
  slider.hidden = stepNames.length < 2;
  const range = element("input", slider);
  range.type = "range";
  range.min = 0;
  range.max = range.value = stepNames.length - 1;
  const output = element("output", slider, "", state.step);
  range.addEventListener("input", () => {
    state.step = output.textContent = stepNames[range.value];
    range.setAttribute("aria-valuetext", state.step);
    drawAll();
  });
  option(parent, "largest first", (checked) => {
    state.sorted = checked;
    for (const panel of panels) panel.showFocus();
  });
  const set = (name) => (checked) => {
    state[name] = checked;
    drawAll();
  };
  const options = [
    ["large", "zoomed", "Labels at all tokens; the views scroll"],
    ["bright", "bright", "Colours of weights by their square root, which shows small ones"],
  ];
  for (const [text, name, title] of options) {
    const root = option(parent, text, set(name));
    root.hidden = longestText <= MOST_LABELS;
    root.title = title;
  }
  return new Search(parent);
}
