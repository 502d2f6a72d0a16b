// The views of answers. Every function returns DOM nodes; texts of models and callers are only in text nodes.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const width = (share) => `${Math.min(100, 100 * share)}%`;
export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}
const shown = (score) => (score >= 0 && score <= 1 ? percent(score) : score.toFixed(4));

export function bars(pairs) {
  const largest = Math.max(...pairs.map(([, score]) => Math.abs(score)), 1e-9);
  const most = pairs.every(([, score]) => score >= 0 && score <= 1) ? 1 : largest;
  const rows = pairs.map(([name, score]) => element("tr", {},
    element("th", { scope: "row" }, name),
    element("td", {}, element("div", { class: "track", "aria-hidden": "true" }, element("div", { class: "bar", style: { width: width(Math.abs(score) / most) } }))),
    element("td", { class: "number" }, shown(score))));
  return element("table", { class: "bars" }, element("tbody", {}, ...rows));
}

// Offsets count Unicode code points, but JavaScript's strings have UTF-16 units.
export function spans(text, found) {
  const points = [...text];
  const names = [...new Set(found.map((span) => span.name))];
  const parts = [];
  let place = 0;
  for (const span of [...found].sort((a, b) => a.start - b.start)) {
    if (span.start < place) continue; // inside the previous one
    parts.push(points.slice(place, span.start).join(""));
    parts.push(element("mark", { class: `k${names.indexOf(span.name) % 6}` }, points.slice(span.start, span.end).join(""),
      element("small", {}, `${span.name} ${percent(span.score)}`)));
    place = span.end;
  }
  parts.push(points.slice(place).join(""));
  return element("div", {}, element("p", { class: "text" }, ...parts), ...(found.length === 0 ? [element("p", {}, "Nothing was found.")] : []));
}

export function similarityMap(texts, rows) {
  const head = element("tr", {}, element("td"), ...texts.map((text, i) => element("th", { scope: "col", title: text }, String(i + 1))));
  const body = rows.map((row, i) => element("tr", {}, element("th", { scope: "row" }, element("b", {}, `${i + 1} `), texts[i]),
    ...row.map((value) => element("td", { style: { background: `color-mix(in srgb, var(--accent) ${Math.round(60 * Math.max(0, value))}%, transparent)` } }, value.toFixed(2)))));
  return element("div", { class: "scroll" }, element("table", { class: "map" }, element("thead", {}, head), element("tbody", {}, ...body)));
}
