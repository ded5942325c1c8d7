// Makes the page, and draws it again when its size or its colours change.

makeControls(document.getElementById("controls"));
const panels = panelNames.map((name) => new Panel(document.getElementById("panels"), name));
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
