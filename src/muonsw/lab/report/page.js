"use strict";
(() => {
  const { charts, arms, labels, themes } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true, displaylogo: false, scrollZoom: false, displayModeBar: coarse ? true : "hover",
    // All buttons: among plotly's own is one that uploads the chart.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"]],
  };
  let theme = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  let grouping = "arm";
  let singles = true;
  const hidden = new Set();
  const drawn = new Set();

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };

  // Plotly reads a few tags inside its texts; names are shown as they are.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shownLabels = labels.map(plain);
  const shownArms = arms.map((arm) => plain(arm.name));

  const entryOf = (curve) => (grouping === "arm" ? "arm:" + curve.arm : "run:" + curve.label);

  // Curves that look alike are one trace, broken between them: hundreds of lines stay one object.
  const joined = (curves, style, points) => {
    const x = [], y = [], text = [];
    for (const curve of curves) {
      for (let k = 0; k < curve.x.length; k++) {
        x.push(curve.x[k]); y.push(curve.y[k]); text.push(shownLabels[curve.label]);
      }
      x.push(null); y.push(null); text.push("");
    }
    const { arm } = curves[0];
    return {
      type: "scatter", mode: style.mode || (points ? "lines+markers" : "lines"), x, y, text, connectgaps: false, showlegend: false,
      name: shownArms[arm], opacity: style.opacity, meta: { arm, label: curves[0].label },
      line: { color: style.colour || arms[arm].colours[theme], width: style.width, dash: style.dash, simplify: false },
      hovertemplate: "<b>%{text}</b>" + (style.word || "") + "<br>%{x:,} · %{y:.5g}<extra>" + shownArms[arm] + "</extra>",
    };
  };

  const traces = (chart) => {
    const groups = new Map();
    const middles = new Set(grouping === "arm" ? chart.curves.filter((c) => c.middle).map((c) => c.arm) : []);
    for (const curve of chart.curves) {
      const thin = middles.has(curve.arm) && !curve.middle && !curve.line;
      if ((curve.middle && grouping !== "arm") || hidden.has(entryOf(curve)) || (thin && !singles)) continue;
      const style = curve.middle ? { width: 2.6, dash: arms[curve.arm].dash, opacity: 1 }
        : curve.line === "none" ? { width: 1.2, dash: "solid", opacity: 0.6, mode: "markers" }
        : curve.line ? { width: 1.8, dash: curve.line === "dotted" ? "dot" : "dash", opacity: 1, word: " predicted" }
        : thin ? { width: 0.9, dash: "solid", opacity: 0.4 }
        : { width: 1.7, dash: arms[curve.arm].dash, opacity: 1 };
      if (curve.neutral) style.colour = themes[theme].colours.text;
      const key = [entryOf(curve), style.width, style.dash, style.colour].join();
      if (!groups.has(key)) groups.set(key, { curves: [], style });
      groups.get(key).curves.push(curve);
    }
    return [...groups.values()]
      .sort((one, other) => one.style.width - other.style.width)
      .map(({ curves, style }) => joined(curves, style, chart.points));
  };

  const axis = (title, log) => ({
    ...themes[theme].axis, type: log ? "log" : "linear", title: { text: title, standoff: 6, font: { size: 13 } }, automargin: true, exponentformat: "power",
    nticks: log ? 4 : 7, // more would label every digit between two powers of ten
  });

  // Heights and steps that mean something: bands behind the curves, lines above them.
  const shapes = (chart) => {
    const { colours } = themes[theme];
    const across = { type: "line", xref: "paper", x0: 0, x1: 1 };
    return [
      ...chart.bands.map(({ low, high }) => ({
        type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: high, fillcolor: colours.grid, opacity: 0.5,
        layer: "below", line: { width: 0 },
      })),
      ...chart.levels.map(({ y, label }) => ({
        ...across, y0: y, y1: y,
        line: label ? { color: colours.bound, width: 1.6, dash: "dash" } : { color: colours.muted, width: 1 },
      })),
      ...chart.marks.map(({ x, arm }) => ({
        type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: arms[arm].colours[theme], width: 1 },
      })),
    ];
  };

  const names = (chart, log) => chart.levels.filter(({ label }) => label).map(({ y, label }) => ({
    xref: "paper", x: 1, xanchor: "right", y: log ? Math.log10(y) : y, yanchor: "bottom", text: plain(label), showarrow: false,
    font: { size: 11, color: themes[theme].colours.muted },
  }));

  const chartLayout = (chart) => {
    const log = chart.y.log !== Boolean(chart.flipped);
    const y = axis("", log);
    const range = chart.all ? null : chart.y.window;
    if (range && !(log && range[0] <= 0)) y.range = log ? range.map(Math.log10) : range;
    return {
      ...themes[theme].layout, xaxis: axis(chart.x.title, chart.x.log), yaxis: y, hovermode: "closest", showlegend: false,
      margin: { l: 8, r: 26, t: 14, b: 8 }, dragmode: coarse ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)" }, shapes: shapes(chart), annotations: names(chart, log),
      // Zoom survives other changes, not a change of the range itself.
      uirevision: [log, Boolean(chart.all)].join(),
    };
  };

  const drawChart = (chart) => {
    drawn.add(chart);
    Plotly.react(chart.name, traces(chart), chartLayout(chart), config);
  };

  const entries = () => {
    if (grouping === "arm") return arms.map((arm, k) => ({ key: "arm:" + k, text: arm.name, arm, count: arm.runs }));
    const found = new Map();
    for (const chart of charts) {
      for (const { label, arm, middle } of chart.curves) if (!middle) found.set(label, arm);
    }
    return [...found].map(([label, arm]) => ({ key: "run:" + label, text: labels[label], arm: arms[arm], count: 1 }));
  };

  const entryButton = ({ key, text, arm, count }) => {
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.borderTopColor = arm.colours[theme];
    swatch.style.borderTopStyle = grouping !== "arm" || arm.dash === "solid" ? "solid" : arm.dash === "dot" ? "dotted" : "dashed";
    const more = count > 1 ? [make("small", {}, " × " + count)] : [];
    const entry = make("button", { type: "button", class: "entry", "aria-pressed": String(!hidden.has(key)) }, swatch, text, ...more);
    entry.addEventListener("click", () => {
      if (!hidden.delete(key)) hidden.add(key);
      entry.setAttribute("aria-pressed", String(!hidden.has(key)));
      redraw();
    });
    return entry;
  };

  const groupChoice = () => {
    const options = [["arm", "by arm"], ["run", "by run"]].map(([value, text]) => make("option", { value }, text));
    const choice = make("select", { "aria-label": "Group curves" }, ...options);
    choice.value = grouping;
    choice.addEventListener("change", () => {
      grouping = choice.value;
      hidden.clear();
      legend();
      redraw();
      document.querySelector(".legend select").focus();
    });
    return choice;
  };

  const singlesChoice = () => {
    const box = make("input", { type: "checkbox" });
    box.checked = singles;
    box.addEventListener("change", () => { singles = box.checked; redraw(); });
    return make("label", {}, box, " thin lines");
  };

  const legend = () => {
    for (const place of document.querySelectorAll(".legend")) {
      const list = make("div", { class: "entries", role: "group", "aria-label": "Shown curves" }, ...entries().map(entryButton));
      const choices = make("div", { class: "choices" });
      if (arms.some((arm) => arm.runs > 1)) choices.append(groupChoice());
      if (grouping === "arm" && charts.some((chart) => chart.curves.some((curve) => curve.middle))) choices.append(singlesChoice());
      place.replaceChildren(list, choices);
    }
  };

  const redraw = () => drawn.forEach(drawChart);

  const recolour = () => {
    for (const [name, colour] of Object.entries(themes[theme].colours)) {
      if (typeof colour === "string") root.style.setProperty("--" + name, colour);
    }
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", "Switch to " + button.textContent + " colours");
    button.setAttribute("aria-pressed", String(theme === "dark"));
    legend();
    redraw();
  };

  const tools = {
    all: (chart) => { chart.all = !chart.all; return chart.all; },
    log: (chart) => { chart.flipped = !chart.flipped; return chart.y.log !== chart.flipped; },
    wide: (chart, figure) => figure.classList.toggle("wide"),
  };
  for (const tool of document.querySelectorAll("[data-tool]")) {
    const chart = charts.find(({ name }) => name === tool.dataset.figure);
    if (tool.dataset.tool === "log") tool.setAttribute("aria-pressed", String(chart.y.log));
    tool.addEventListener("click", () => {
      tool.setAttribute("aria-pressed", String(tools[tool.dataset.tool](chart, tool.closest("figure"))));
      drawChart(chart);
      if (tool.dataset.tool === "wide") Plotly.Plots.resize(chart.name);
    });
  }

  button.addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    recolour();
  });
  recolour();

  // A table that is wider than the page says how many of its columns are out of sight.
  const markScroll = (box) => {
    const right = box.getBoundingClientRect().right;
    const beyond = [...box.querySelectorAll("thead th")].filter((cell) => cell.getBoundingClientRect().right > right + 1).length;
    box.classList.toggle("cut", beyond > 0);
    const more = box.nextElementSibling;
    more.hidden = !beyond;
    more.textContent = beyond === 1 ? "→ scroll for the rest" : "→ scroll for " + beyond + " more columns";
  };
  const boxes = [...document.querySelectorAll(".scroll")];
  const resized = new ResizeObserver((seen) => seen.forEach(({ target }) => markScroll(target)));
  for (const box of boxes) {
    resized.observe(box);
    box.addEventListener("scroll", () => markScroll(box), { passive: true });
  }

  // A chart is drawn when it comes near, so that a page of many opens at once.
  const near = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      drawChart(charts.find(({ name }) => name === target.id));
    }
  }, { rootMargin: "600px" });
  for (const { name } of charts) near.observe(document.getElementById(name));
  window.addEventListener("beforeprint", () => charts.forEach(drawChart));
})();
