const specs = JSON.parse(document.getElementById("figures").textContent);
const told = (value) => value === "null" ? "–" : String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;");
const options = { renderer: "svg", actions: false, ast: true, tooltip: { theme: "zero", sanitize: told } };
const place = (number) => document.getElementById("figure-" + number);
const columns = (number) => Math.max(1, Math.floor((place(number).clientWidth - 40) / 130));  // of a legend
const views = [];
async function draw(number) {
  const fitting = specs[number].config.legend.columns = columns(number);
  views[number]?.finalize();
  views[number] = await vegaEmbed(place(number), specs[number], options);
  place(number).dataset.columns = fitting;
}
const redraw = () => specs.forEach(
  (_, number) => columns(number) != place(number).dataset.columns && draw(number));
let waiting;
addEventListener("resize", () => {  // what fits into a row changes; the rest follows by itself
  clearTimeout(waiting);
  waiting = setTimeout(redraw, 150);
});
Promise.all(specs.map((_, number) => draw(number))).then(
  () => document.body.dataset.drawn = specs.length, (error) => document.body.dataset.failed = String(error));
