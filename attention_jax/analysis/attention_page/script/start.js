// Makes the page, and draws it again when its size or its colours change.

let search;

async function start() {
  const arrays = data.captures.flatMap(({ attentions }) => attentions)
    .flatMap((attention) => Object.values(attention.arrays));
  for (const array of distinct(arrays)) if (array.compression) await inflate(array);
  search = makeControls(document.getElementById("controls"));
  const room = document.getElementById("panels");
  room.replaceChildren();
  for (const name of panelNames) panels.push(new Panel(room, name));
  drawAll();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) drawAll();
    width = window.innerWidth;
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") clear();
  });
}

start();
