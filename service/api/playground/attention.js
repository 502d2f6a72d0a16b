// The attention weights of a layer, one head at a time.
import { element, percent } from "./views.js";

const MAX_TOKENS = 64; // tokens that are drawn: a larger map would have too many cells for a page

// `heads` is [heads][tokens][tokens]: one row per token, with its attention to each token.
export function attentionMap(tokens, heads) {
  const shown = tokens.slice(0, MAX_TOKENS);
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
  const cut = tokens.length > MAX_TOKENS ? [element("p", {}, `The first ${MAX_TOKENS} of ${tokens.length} tokens are drawn.`)] : [];
  return [element("label", {}, "Head", choice), ...cut, place];
}
