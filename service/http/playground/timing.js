// Where the time of a request went: the four parts of the header `server-timing`, and what is left.
import { element } from "./views.js";

const ABOUT = {
  tokenize: "text to tokens", queue: "until the last run began", inference: "the longest run", decode: "numbers to the answer", rest: "HTTP and this browser",
};

// A request of several runs waits for some while others run: then its parts are more than the whole, and nothing can be said to be left.
export function timingBar(header, ms) {
  const parts = [...header.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, duration]) => [name, Number(duration)]);
  const sum = parts.reduce((total, [, duration]) => total + duration, 0);
  const all = sum < ms ? [...parts, ["rest", ms - sum]] : parts;
  const whole = Math.max(sum, ms, 1e-9);
  const strip = element("div", { class: "split", "aria-hidden": "true" }, ...all.map(([, duration], i) => element("span", {
    class: `part${i}`, style: { width: `${(100 * duration) / whole}%` },
  })));
  const names = all.map(([name, duration], i) => element("div", {},
    element("dt", {}, element("span", { class: `dot part${i}`, "aria-hidden": "true" }), name),
    element("dd", {}, element("b", {}, `${duration.toFixed(duration < 100 ? 1 : 0)} ms`), ...(ABOUT[name] ? [element("small", {}, ABOUT[name])] : []))));
  const overlap = sum < ms ? [] : [element("p", { class: "quiet" }, `${ms.toFixed(1)} ms in all. The request took several runs, and waiting for one overlaps with another.`)];
  return [...overlap, strip, element("dl", { class: "timing" }, ...names)];
}
