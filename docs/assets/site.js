// A table that is wider than the page says how many of its columns are out of sight.
const markColumns = (box, more) => {
  const right = box.getBoundingClientRect().right;
  const beyond = [...box.querySelectorAll("thead th")].filter((cell) => cell.getBoundingClientRect().right > right + 1).length;
  box.classList.toggle("cut", beyond > 0);
  more.hidden = !beyond;
  more.textContent = beyond === 1 ? "→ scroll for one more column" : `→ scroll for ${beyond} more columns`;
};

const watchTables = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const more = document.createElement("p");
    more.className = "more-columns";
    box.tabIndex = 0; // so that the keyboard scrolls it, too
    box.after(more);
    new ResizeObserver(() => markColumns(box, more)).observe(box);
    box.addEventListener("scroll", () => markColumns(box, more), { passive: true });
  }
};

// The theme wraps tables once it has the page.
document$.subscribe(() => requestAnimationFrame(watchTables));
