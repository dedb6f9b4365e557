"use strict";
(() => {
  const { figures, arms } = JSON.parse(document.getElementById("data").textContent);
  // On a touch screen, dragging scrolls the page.
  const dragmode = window.matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const config = {
    responsive: true, displaylogo: false,
    // Listed here because plotly's default includes a button that uploads the chart.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["autoScale2d", "resetScale2d"]],
  };
  const hidden = new Set();

  const draw = ({ name, data, layout }) => {
    const traces = data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));
    // A constant `uirevision` keeps the zoom when arms are hidden.
    Plotly.react(name, traces, { ...layout, uirevision: "zoom", dragmode }, config);
  };

  // One legend for all charts.
  for (const { name, runs, colour, dash } of arms) {
    const entry = document.createElement("button");
    const swatch = document.createElement("span");
    entry.type = "button";
    entry.className = "entry";
    swatch.className = "swatch";
    swatch.style.borderTopColor = colour;
    swatch.style.borderTopStyle = { solid: "solid", dot: "dotted" }[dash] || "dashed";
    entry.append(swatch, runs > 1 ? name + " × " + runs : name);
    entry.setAttribute("aria-pressed", "true");
    entry.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      entry.setAttribute("aria-pressed", String(!hidden.has(name)));
      figures.forEach(draw);
    });
    document.querySelector(".legend")?.append(entry);
  }
  figures.forEach(draw);
})();
