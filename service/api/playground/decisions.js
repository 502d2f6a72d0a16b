// The decision of an answer, and how well the scores of a calibrated model match the outcomes.
import { element, percent } from "./views.js";

const SVG = "http://www.w3.org/2000/svg";

// The decision in an answer to `decide`, if there is one.
export const decisionIn = (answer) => [answer].flat().find((item) => item?.abstained !== undefined);

export function decisionText({ decision, abstained, reason, left_out: leftOut }, body) {
  if (abstained) return `No decision: ${reason}.`;
  const names = [decision].flat().map((item) => (typeof item === "number" ? body.texts[item] : item || "no answer"));
  return `Decision: ${names.join(", ") || "none of them"}${leftOut ? `; ${leftOut} below the threshold` : ""}`;
}

function line(name, points) {
  const node = document.createElementNS(SVG, "polyline");
  node.setAttribute("class", name);
  node.setAttribute("points", points.map(([x, y]) => `${100 * x},${100 - 100 * y}`).join(" "));
  return node;
}

// A reliability diagram: the share of correct predictions with about the same score, before and after the calibration.
export function reliability(calibration) {
  if (!calibration) return [];
  const { before, after } = calibration;
  const points = ({ bins }) => bins.map((bin) => [bin.score, bin.correct]);
  const chart = document.createElementNS(SVG, "svg");
  chart.setAttribute("viewBox", "-2 -2 104 104");
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", points(after).map(([score, correct]) => `score ${percent(score)}: ${percent(correct)} correct`).join(", "));
  chart.append(line("ideal", [[0, 0], [1, 1]]), line("before", points(before)), line("after", points(after)));
  return [element("details", { class: "reliability" },
    element("summary", {}, "How well the scores are calibrated"),
    element("p", { class: "quiet" }, `Share of correct predictions (upwards) by score, on ${calibration.tested} examples. On the thin line they are equal. `
      + `Mean distance: ${percent(before.ece.value)} before the calibration (dashed), ${percent(after.ece.value)} after it.`),
    chart)];
}
