"use strict";
(() => {
  const { figures, arms } = JSON.parse(document.getElementById("data").textContent);
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true, displaylogo: false,
    // Listed here because plotly's default includes a button that uploads the chart.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["autoScale2d", "resetScale2d"]],
  };
  const hidden = new Set();
  const drawn = new Set();

  const draw = (figure) => {
    drawn.add(figure);
    const data = figure.data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));
    // Keep the zoom when arms are hidden; on a touch screen, dragging scrolls the page.
    const layout = { ...figure.layout, uirevision: figure.layout.yaxis.type, dragmode: coarse ? false : "zoom" };
    Plotly.react(figure.name, data, layout, config);
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
      drawn.forEach(draw);
    });
    document.querySelector(".legend")?.append(entry);
  }

  for (const button of document.querySelectorAll("[data-log]")) {
    const figure = figures.find(({ name }) => name === button.dataset.log);
    const axis = figure.layout.yaxis;
    button.setAttribute("aria-pressed", String(axis.type === "log"));
    button.addEventListener("click", () => {
      const log = axis.type !== "log";
      axis.type = log ? "log" : "linear";
      if (axis.range) axis.range = log && axis.range[0] <= 0 ? undefined : axis.range.map(log ? Math.log10 : (x) => 10 ** x);
      button.setAttribute("aria-pressed", String(log));
      draw(figure);
    });
  }

  // Draw a chart when it comes near the viewport, so a long page opens fast.
  const near = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      draw(figures.find(({ name }) => name === target.id));
    }
  }, { rootMargin: "600px" });
  for (const { name } of figures) near.observe(document.getElementById(name));
  window.addEventListener("beforeprint", () => figures.forEach(draw));
})();
