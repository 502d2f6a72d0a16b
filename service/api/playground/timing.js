// The time of a request by stage: the four parts of the header `server-timing`, and the rest.
import { element } from "./views.js";

const ABOUT = {
  tokenize: "text to tokens", queue: "wait for the first run", inference: "all runs of the model", decode: "numbers to the answer", rest: "HTTP and this browser",
};

export function timingBar(header, ms) {
  const parts = [...header.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, duration]) => [name, Number(duration)]);
  const sum = parts.reduce((total, [, duration]) => total + duration, 0);
  const all = [...parts, ["rest", Math.max(ms - sum, 0)]];
  const whole = Math.max(sum, ms, 1e-9);
  const strip = element("div", { class: "split", "aria-hidden": "true" }, ...all.map(([, duration], i) => element("span", {
    class: `part${i}`, style: { width: `${(100 * duration) / whole}%` },
  })));
  const names = all.map(([name, duration], i) => element("div", {},
    element("dt", {}, element("span", { class: `dot part${i}`, "aria-hidden": "true" }), name),
    element("dd", {}, element("b", {}, `${duration.toFixed(duration < 100 ? 1 : 0)} ms`), ...(ABOUT[name] ? [element("small", {}, ABOUT[name])] : []))));
  return [strip, element("dl", { class: "timing" }, ...names)];
}
