"use strict";
(() => {
  const { figures, themes } = JSON.parse(document.getElementById("data").textContent);
  const button = document.getElementById("theme");
  let theme = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

  // The first letters of an axis' key say what it is: xaxis, xaxis2, yaxis, ...
  const themed = (layout, look) => {
    const merged = { ...look.layout, ...layout, legend: { ...look.layout.legend, ...layout.legend } };
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) merged[key] = { ...look.axis, ...layout[key] };
    }
    return merged;
  };

  const coloured = (trace, colours) => ({ ...trace, line: { ...trace.line, color: colours[trace.meta] } });

  const draw = () => {
    const look = themes[theme];
    for (const [name, colour] of Object.entries(look.colours)) {
      if (typeof colour === "string") document.documentElement.style.setProperty("--" + name, colour);
    }
    document.documentElement.style.colorScheme = theme;
    button.textContent = theme === "dark" ? "light" : "dark";
    button.setAttribute("aria-pressed", String(theme === "dark"));
    for (const { name, data, layout } of figures) {
      const traces = data.map((trace) => coloured(trace, look.colours));
      const config = { responsive: true, displaylogo: false, scrollZoom: false };
      Plotly.react(name, traces, themed(layout, look), config);
    }
  };

  button.addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    draw();
  });
  draw();
})();
