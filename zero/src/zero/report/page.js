const specs = JSON.parse(document.getElementById("figures").textContent);
const told = (value) => value === "null" ? "–" : String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;");
const options = { renderer: "svg", actions: false, ast: true, tooltip: { theme: "zero", sanitize: told } };
const place = (number) => document.getElementById("figure-" + number);
const columns = (number) => Math.max(1, Math.floor((place(number).clientWidth - 40) / 130));  // of a legend
const shared = {  // by all figures
  width: "container", autosize: { type: "fit-x", contains: "padding" },
  config: {
    background: "transparent", font: "system-ui, sans-serif", view: { stroke: null },
    padding: { left: 4, top: 14, right: 12, bottom: 4 },
    axis: {
      labelColor: "currentColor", titleColor: "currentColor", labelFontSize: 11, titleFontSize: 12,
      titleFontWeight: "normal", titlePadding: 8, labelOverlap: true, labelSeparation: 6,
      gridColor: "currentColor", gridOpacity: 0.12, domainColor: "currentColor", domainOpacity: 0.5,
      tickColor: "currentColor", tickOpacity: 0.5,
    },
    axisX: { grid: false, tickCount: 6 },
    legend: {
      labelColor: "currentColor", orient: "bottom", direction: "horizontal", labelFontSize: 12, labelLimit: 200,
    },
  },
};
const views = [];
async function draw(number) {
  const legend = { ...shared.config.legend, columns: columns(number) };
  const spec = { ...shared, ...specs[number], config: { ...shared.config, legend } };
  views[number]?.finalize();
  views[number] = await vegaEmbed(place(number), spec, options);
  place(number).dataset.columns = legend.columns;
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
