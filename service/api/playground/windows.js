// The parts of a text that the model read: windows of a long text, and where it was cut. All of it is from the header `x-windows`.
import { element } from "./views.js";

const AROUND = 160; // code points that are shown on both sides of a cut
const COUNT = new Intl.NumberFormat("en");

// `context=0-1653, context=1093-2748, ...` as [{ field, start, end }], and whether there are more.
export function parseWindows(header) {
  const windows = [...(header ?? "").matchAll(/(?:(\w+)=)?(\d+)-(\d+)/g)].map(([, field, start, end]) => ({ field: field ?? "", start: Number(start), end: Number(end) }));
  return { windows, more: (header ?? "").endsWith("...") };
}

// The windows in as few rows as possible, without overlaps within a row.
function inRows(windows) {
  const ends = [];
  return windows.map((window) => {
    const free = ends.findIndex((end) => end <= window.start);
    const row = free < 0 ? ends.length : free;
    ends[row] = window.end;
    return { ...window, row };
  });
}

function strip(windows, length, found) {
  const placed = inRows(windows);
  const part = (count) => `${(100 * count) / Math.max(length, 1)}%`;
  const rows = Math.max(...placed.map((window) => window.row)) + 1;
  return element("div", { class: "strip", "aria-hidden": "true", style: { height: `${1.5 * rows + (found.length > 0 ? 0.7 : 0)}rem` } },
    ...placed.map((window, i) => element("span", {
      class: "window", title: `window ${i + 1}: characters ${COUNT.format(window.start + 1)} to ${COUNT.format(window.end)}`,
      style: { left: part(window.start), width: part(window.end - window.start), top: `${1.5 * window.row}rem` },
    }, placed.length <= 12 ? String(i + 1) : "")),
    ...found.map((span) => element("span", { class: "place", style: { left: part(span.start), width: part(span.end - span.start) } })));
}

function windowTable(windows) {
  const rows = windows.map((window, i) => element("tr", {},
    element("th", { scope: "row" }, String(i + 1)),
    element("td", { class: "number" }, `${COUNT.format(window.start + 1)} to ${COUNT.format(window.end)}`),
    element("td", { class: "number" }, i + 1 < windows.length ? COUNT.format(Math.max(0, window.end - windows[i + 1].start)) : "–")));
  const head = element("tr", {}, ...["Window", "Characters", "Shared with the next"].map((name, i) => element("th", { scope: "col", ...(i > 0 ? { class: "number" } : {}) }, name)));
  return element("details", {}, element("summary", {}, "Where each window begins and ends"), element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function inWindows(windows, more, text, found) {
  const length = [...text].length;
  return [
    element("h3", {}, `Read in ${more ? "more than " : ""}${windows.length} windows`),
    element("p", { class: "quiet" }, `The text has ${COUNT.format(length)} characters. Neighboring windows overlap, so that nothing is lost at a seam.${found.length > 0 ? " The marks below show where something was found." : ""}`),
    strip(windows, length, found), windowTable(windows),
  ];
}

// A text that the model read from `start` to `end`: a tokenizer cuts either its end or its beginning.
function cutText(points, start, end) {
  const part = (from, to) => points.slice(Math.max(0, from), to).join("");
  if (part(0, start).trim() === "") {
    const rest = points.length - end - AROUND;
    return [end > AROUND ? "…" : "", part(end - AROUND, end), element("s", { class: "cut" }, part(end, end + AROUND)), rest > 0 ? ` and ${COUNT.format(rest)} more` : ""];
  }
  const rest = start - AROUND;
  return [rest > 0 ? `${COUNT.format(rest)} more and ` : "", element("s", { class: "cut" }, part(start - AROUND, start)), part(start, start + AROUND), start + AROUND < points.length ? "…" : ""];
}

function cutOff(windows, texts) {
  return windows.flatMap(({ field, start, end }) => {
    const points = [...(texts[field] ?? "")];
    if (start === 0 && end >= points.length) return [];
    return [
      element("h3", {}, field === "" ? "What was cut" : `What was cut of the ${field === "text" ? "first" : "second"} text`),
      element("p", { class: "quiet" }, `The model read ${COUNT.format(end - start)} of ${COUNT.format(points.length)} characters. It did not read the struck-out text.`),
      element("p", { class: "text" }, ...cutText(points, start, end)),
    ];
  });
}

// Shows nothing if each text was read in one window. Texts have the header's names; the marked spans are in code points.
export function windowsView(header, texts, found, isCut) {
  const { windows, more } = parseWindows(header);
  if (windows.length === 0) return [];
  return isCut ? cutOff(windows, texts) : inWindows(windows, more, texts[windows[0].field] ?? "", found);
}
