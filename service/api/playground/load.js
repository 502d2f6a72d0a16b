// A live view of the load, from /metrics: queue length, batch sizes and response times, as differences since the last reading.
import { element } from "./views.js";

const EVERY_MS = 2000;
const KEPT = 60;

function read(page) {
  const samples = [];
  for (const line of page.split("\n")) {
    const match = /^bertserve_(\w+?)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (match) samples.push({ name: match[1], le: /le="([^"]+)"/.exec(match[2] ?? "")?.[1], kind: /kind="([^"]+)"/.exec(match[2] ?? "")?.[1], value: Number(match[3]) });
  }
  return samples;
}

const sum = (samples, name, kind) => samples.filter((s) => s.name === name && (kind === undefined || s.kind === kind)).reduce((total, s) => total + s.value, 0);

function buckets(samples, name) {
  const totals = new Map();
  for (const s of samples) if (s.name === `${name}_bucket`) totals.set(s.le, (totals.get(s.le) ?? 0) + s.value);
  return totals;
}

// The upper bound, in seconds, of the bucket that contains a quantile of the new observations.
function quantile(now, before, share) {
  const counts = [...now].map(([le, count]) => [le === "+Inf" ? Infinity : Number(le), count - (before?.get(le) ?? 0)]).sort((a, b) => a[0] - b[0]);
  const all = counts.at(-1)?.[1] ?? 0;
  return all === 0 ? null : counts.find(([, count]) => count >= share * all)[0];
}

const milliseconds = (seconds) => (seconds === null ? "–" : seconds === Infinity ? "over 30 s" : `≤ ${1000 * seconds} ms`);

// `show` shows or hides the view: a balancer has no metrics, because each replica has its own.
export function watchLoad(place, get, show) {
  const shown = ["Requests per second", "Texts in the queue", "Average batch size", "Padding", "Median latency", "p99 latency"].map((title) => {
    const figure = { value: element("b", {}, "–"), line: document.createElementNS("http://www.w3.org/2000/svg", "polyline"), past: [] };
    const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    chart.setAttribute("viewBox", `0 0 ${KEPT} 20`);
    chart.setAttribute("preserveAspectRatio", "none");
    chart.setAttribute("aria-hidden", "true");
    chart.append(figure.line);
    place.append(element("div", { class: "figure" }, figure.value, title, chart));
    return figure;
  });

  function draw(i, text, number) {
    const figure = shown[i];
    figure.value.textContent = text;
    figure.past = [...figure.past, number].slice(-KEPT);
    const largest = Math.max(...figure.past, 1e-9);
    figure.line.setAttribute("points", figure.past.map((value, x) => `${x},${19 - (18 * value) / largest}`).join(" "));
  }

  let before = null;
  async function poll() {
    if (!document.hidden) {
      const now = read(await (await get()).text());
      const at = performance.now();
      const latency = buckets(now, "request_seconds");
      if (before !== null) {
        const since = (name, kind) => sum(now, name, kind) - sum(before.samples, name, kind);
        const rate = since("request_seconds_count") / ((at - before.at) / 1000);
        const runs = since("batch_rows_count");
        const padding = since("tokens_total", "padded");
        const tokens = padding + since("tokens_total", "real");
        const [half, most] = [0.5, 0.99].map((share) => quantile(latency, before.latency, share));
        draw(0, rate.toFixed(1), rate);
        draw(2, runs > 0 ? (since("batch_rows_sum") / runs).toFixed(1) : "–", runs > 0 ? since("batch_rows_sum") / runs : 0);
        draw(3, tokens > 0 ? `${((100 * padding) / tokens).toFixed(0)} %` : "–", tokens > 0 ? padding / tokens : 0);
        draw(4, milliseconds(half), Math.min(half ?? 0, 30));
        draw(5, milliseconds(most), Math.min(most ?? 0, 30));
      }
      draw(1, String(sum(now, "queue_items")), sum(now, "queue_items"));
      before = { samples: now, latency, at };
    }
  }

  async function pollForever() {
    try {
      await poll();
      show(true);
    } catch (error) {
      show(false);
      if (error.status === 404) return;
    }
    setTimeout(pollForever, EVERY_MS);
  }
  pollForever();
}
