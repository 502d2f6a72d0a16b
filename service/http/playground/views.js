// What an answer looks like. Every function returns DOM nodes; what a model or a caller said stands in text nodes alone.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const width = (share) => `${Math.min(100, 100 * share)}%`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const shown = (score) => (score >= 0 && score <= 1 ? percent(score) : score.toFixed(4));

export function bars(pairs) {
  const largest = Math.max(...pairs.map(([, score]) => Math.abs(score)), 1e-9);
  const most = pairs.every(([, score]) => score >= 0 && score <= 1) ? 1 : largest;
  const rows = pairs.map(([name, score]) => element("tr", {},
    element("th", { scope: "row" }, name),
    element("td", {}, element("div", { class: "bar", "aria-hidden": "true", style: { width: width(Math.abs(score) / most) } })),
    element("td", { class: "number" }, shown(score))));
  return element("table", { class: "bars" }, element("tbody", {}, ...rows));
}

// Offsets are in Unicode code points, and JavaScript's strings are in UTF-16 units.
export function spans(text, found) {
  const points = [...text];
  const names = [...new Set(found.map((span) => span.name))];
  const parts = [];
  let place = 0;
  for (const span of [...found].sort((a, b) => a.start - b.start)) {
    if (span.start < place) continue; // inside the one before
    parts.push(points.slice(place, span.start).join(""));
    parts.push(element("mark", { class: `k${names.indexOf(span.name) % 6}` }, points.slice(span.start, span.end).join(""),
      element("small", {}, `${span.name} ${percent(span.score)}`)));
    place = span.end;
  }
  parts.push(points.slice(place).join(""));
  return element("div", {}, element("p", { class: "text" }, ...parts), ...(found.length === 0 ? [element("p", {}, "Nothing was found.")] : []));
}

export function rankedTexts(pairs) {
  return bars(pairs);
}

export function similarityMap(texts, rows) {
  const head = element("tr", {}, element("td"), ...texts.map((_, i) => element("th", { scope: "col" }, String(i + 1))));
  const body = rows.map((row, i) => element("tr", {}, element("th", { scope: "row" }, `${i + 1} ${texts[i]}`),
    ...row.map((value) => element("td", { style: { background: `color-mix(in srgb, var(--accent) ${Math.round(60 * Math.max(0, value))}%, transparent)` } }, value.toFixed(2)))));
  return element("div", { class: "scroll" }, element("table", { class: "map" }, element("thead", {}, head), element("tbody", {}, ...body)));
}

const MOST_TOKENS = 64; // that are drawn: a map of more is more cells than a page bears

// One head at a time of a layer, [heads][tokens][tokens]: a row for each token, with how much it looks at each.
export function attentionMap(tokens, heads) {
  const shown = tokens.slice(0, MOST_TOKENS);
  const place = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Attention of one head" });
  const draw = (head) => {
    const columns = element("tr", {}, element("td"), ...shown.map((token) => element("th", { scope: "col" }, token)));
    const rows = shown.map((token, i) => element("tr", {}, element("th", { scope: "row" }, token), ...shown.map((other, j) => {
      const share = heads[head][i][j];
      return element("td", { title: `${token} to ${other}: ${percent(share)}`, style: { background: `color-mix(in srgb, var(--accent) ${Math.round(100 * share)}%, transparent)` } },
        element("span", { class: "unseen" }, percent(share)));
    })));
    const caption = `Head ${head}: each row is a token, and a cell says how much of its attention goes to the token of the column.`;
    place.replaceChildren(element("table", { class: "attention" }, element("caption", {}, caption), element("thead", {}, columns), element("tbody", {}, ...rows)));
  };
  const choice = element("select", { onchange: (event) => draw(Number(event.target.value)) }, ...heads.map((_, i) => element("option", { value: String(i) }, String(i))));
  draw(0);
  const cut = tokens.length > MOST_TOKENS ? [element("p", {}, `The first ${MOST_TOKENS} of ${tokens.length} tokens are drawn.`)] : [];
  return [element("label", {}, "Head", choice), ...cut, place];
}

const COLORS = ["var(--c2)", "var(--c0)", "var(--accent)", "var(--c1)", "var(--c3)"];

// `server-timing` names four parts; what is left of the time is the network, HTTP and this browser.
export function timingBar(header, ms) {
  const parts = [...header.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, duration]) => [name, Number(duration)]);
  const rest = Math.max(0, ms - parts.reduce((sum, [, duration]) => sum + duration, 0));
  const all = [...parts, ["HTTP and browser", rest]];
  const strip = element("div", { class: "split", "aria-hidden": "true" }, ...all.map(([, duration], i) => element("span", {
    style: { background: COLORS[i % COLORS.length], width: width(duration / Math.max(ms, 1e-9)) },
  })));
  const rows = all.map(([name, duration], i) => element("tr", {},
    element("th", { scope: "row" }, element("span", { "aria-hidden": "true", style: { color: COLORS[i % COLORS.length] } }, "■ "), name),
    element("td", { class: "number" }, `${duration.toFixed(2)} ms`)));
  return element("div", {}, strip, element("table", {}, element("tbody", {}, ...rows)));
}

const logOdds = (score) => Math.log(Math.max(score, 1e-9) / Math.max(1 - score, 1e-9));

// How far the label's log-odds fall without each word: above 0 the word speaks for the label, below against it. Scores themselves hardly move near 100 %.
export function reasons(text, words, label, scores) {
  const changes = scores.map((score) => logOdds(label.score) - logOdds(score));
  const largest = Math.max(...changes.map(Math.abs), 1e-9);
  const parts = [];
  let place = 0;
  words.forEach(({ start, end }, i) => {
    parts.push(text.slice(place, start));
    const side = Math.abs(changes[i]) < largest / 5 ? "" : changes[i] > 0 ? " for" : " against";
    parts.push(element("span", { class: `word${side}`, title: `without it: ${percent(scores[i])}` }, text.slice(start, end)));
    place = end;
  });
  parts.push(text.slice(place));
  const ranked = words.map((word, i) => [text.slice(word.start, word.end), changes[i], scores[i]]).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 6);
  const rows = ranked.map(([word, change, score]) => element("tr", {}, element("th", { scope: "row" }, word),
    element("td", {}, change >= 0 ? "speaks for it" : "speaks against it"),
    element("td", { class: "number" }, `${percent(score)} without it`)));
  return [
    element("h3", {}, `Why ${label.label}: ${percent(label.score)} with all words`),
    element("p", { class: "text" }, ...parts),
    element("div", { class: "scroll" }, element("table", {}, element("tbody", {}, ...rows))),
  ];
}
