"use strict";

// Headers become buttons that sort; branches of the module tree get one that folds them. Without script
// every table is there in full, in the order of the report.

const value = (cell) => ("v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent);

const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

// A row with the rows below it, by depth; a flat table is a tree of one level.
function treeOf(rows) {
  const root = { below: [] };
  const path = [root];
  for (const row of rows) {
    const depth = Math.min(Number(row.dataset.depth ?? 0), path.length - 1);
    path.length = depth + 1;
    const node = { row, below: [] };
    path[depth].below.push(node);
    path.push(node);
  }
  return root;
}

// Rows in order: siblings by the column, each followed by what is below it.
function ordered(node, column, sign) {
  const key = (child) => value(child.row.cells[column]);
  const below = [...node.below].sort((a, b) => sign * compare(key(a), key(b)));
  return below.flatMap((child) => [child.row, ...ordered(child, column, sign)]);
}

function makeSortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  headers.forEach((header, column) => {
    const isText = !header.classList.contains("n");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    header.replaceChildren(button);
    header.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      // Figures begin with the largest, names with the first.
      const first = isText ? "ascending" : "descending";
      const other = isText ? "descending" : "ascending";
      const order = header.getAttribute("aria-sort") === first ? other : first;
      headers.forEach((each) => each.setAttribute("aria-sort", "none"));
      header.setAttribute("aria-sort", order);
      body.append(...ordered(treeOf(body.rows), column, order === "ascending" ? 1 : -1));
    });
  });
}

function show(node, isShown) {
  for (const child of node.below) {
    child.row.hidden = !isShown;
    show(child, isShown && child.row.dataset.folded !== "true");
  }
}

function fold(row, isFolded) {
  row.dataset.folded = isFolded;
  row.querySelector("button").setAttribute("aria-expanded", !isFolded);
}

function makeFoldable(table) {
  const body = table.tBodies[0];
  const visit = (node, depth) => {
    for (const child of node.below) {
      visit(child, depth + 1);
      if (!child.below.length) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "fold";
      button.setAttribute("aria-label", `below ${child.row.cells[0].title}`);
      child.row.cells[0].prepend(button);
      fold(child.row, depth >= 1);
      button.addEventListener("click", () => {
        fold(child.row, child.row.dataset.folded !== "true");
        show(treeOf(body.rows), true);
      });
    }
  };
  visit(treeOf(body.rows), 0);
  show(treeOf(body.rows), true);
}

document.querySelectorAll("table").forEach(makeSortable);
document.querySelectorAll("table.tree").forEach(makeFoldable);

// A line above each table that is wider than the window, which says so. Shades at its sides do without script.
function makeCue(box) {
  const cue = document.createElement("p");
  cue.className = "cue";
  cue.textContent = box.querySelector("table") ? "more columns: scroll →" : "scroll →";
  cue.hidden = true;
  box.before(cue);
  const update = () => { cue.hidden = box.scrollWidth <= box.clientWidth + 1; };
  new ResizeObserver(update).observe(box);
}

document.querySelectorAll(".scroll").forEach(makeCue);
