// Explains an answer: shows the service's `explanation` as colors in the text and as a list.
import { element, percent } from "./views.js";

const MAX_ROWS = 8;
const NAMES = { text: "First text", text_pair: "Second text", question: "Question", context: "Passage" };
const logOdds = (score) => Math.log(Math.max(score, 1e-9) / Math.max(1 - score, 1e-9));

// Probabilities hardly change near 100 %, so words are compared by log-odds; other scores are compared directly.
function strengths({ score, explanation }) {
  const within = [score, ...explanation.map((item) => score - item.importance)].every((value) => value >= 0 && value <= 1);
  return explanation.map((item) => (within ? logOdds(score) - logOdds(score - item.importance) : item.importance));
}

const shown = (value) => (value >= 0 && value <= 1 ? percent(value) : value.toFixed(3));

function colored(text, words) {
  const points = [...text];
  const parts = [];
  let place = 0;
  for (const { item, share, title } of words) {
    parts.push(points.slice(place, item.start).join(""));
    const color = share > 0 ? "var(--for)" : "var(--against)";
    const strong = Math.abs(share) >= 0.2;
    parts.push(element("span", {
      class: `word${strong ? (share > 0 ? " for" : " against") : ""}`, title,
      style: { background: `color-mix(in srgb, ${color} ${Math.round(45 * Math.abs(share))}%, transparent)` },
    }, points.slice(item.start, item.end).join("")));
    place = item.end;
  }
  parts.push(points.slice(place).join(""));
  return element("p", { class: "text" }, ...parts);
}

function row({ item, share, without }, score) {
  const side = share > 0 ? "for" : "against";
  return element("tr", {},
    element("th", { scope: "row" }, item.word, ...(item.field ? [element("small", {}, ` ${(NAMES[item.field] ?? item.field).toLowerCase()}`)] : [])),
    element("td", { class: "sides" },
      element("span", { class: "unseen" }, share > 0 ? "raises the score" : "lowers the score"),
      element("div", { class: `side ${side}-side`, "aria-hidden": "true", style: { width: `${50 * Math.abs(share)}%` } })),
    element("td", { class: "number" }, `${shown(score)} → ${shown(without)}`));
}

// An answer's `score` and `explanation`, and the texts by the names in the explanation.
export function reasons(title, { score, explanation }, texts) {
  if (explanation.length === 0) return [];
  const strong = strengths({ score, explanation });
  const largest = Math.max(...strong.map(Math.abs), 1e-9);
  const words = explanation.map((item, i) => {
    const without = score - item.importance;
    return { item, share: strong[i] / largest, without, title: `${shown(without)} without it` };
  });
  const paragraphs = Object.entries(texts).flatMap(([field, text]) => {
    const own = words.filter(({ item }) => (item.field ?? "") === field);
    return [...(field && own.length > 0 ? [element("h4", {}, NAMES[field] ?? field)] : []), ...(own.length > 0 ? [colored(text, own)] : [])];
  });
  const ranked = [...words].sort((a, b) => Math.abs(b.share) - Math.abs(a.share)).filter(({ share }) => Math.abs(share) >= 0.05).slice(0, MAX_ROWS);
  const moved = Math.max(...explanation.map((item) => Math.abs(item.importance)));
  return [
    element("h3", {}, title),
    element("p", { class: "quiet" },
      element("span", { class: "word for key" }, "Green"), " raises the score, ", element("span", { class: "word against key" }, "red"),
      " lowers it, compared with the text without the word.",
      moved < 0.01 ? " No single word changes the score by 1 %: several words have the same effect." : ""),
    ...paragraphs,
    element("table", { class: "reasons" },
      element("caption", { class: "unseen" }, "The words that matter most, with the score with all words and without the word"),
      element("tbody", {}, ...ranked.map((word) => row(word, score)))),
  ];
}
