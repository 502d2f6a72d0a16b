// The playground: one form a task, and what the service answers, as a person reads it. Texts are only ever put into text nodes.
import { element, bars, spans, rankedTexts, similarityMap, attentionMap, timingBar, reasons } from "./views.js";
import { inCurl, inPython, inJavaScript } from "./snippets.js";
import { watchLoad } from "./load.js";

const $ = (id) => document.getElementById(id);
const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

// Of each path: its name, its fields, the body that they make, and how its answer is shown. The first field has the text that is marked.
const TASKS = {
  "/classify": {
    title: "Classify",
    fields: [
      { name: "text", label: "Text", value: "The plot is thin and the ending drags, but the cast is a delight." },
      { name: "pair", label: "Second text, for models of pairs", value: "", rows: 1 },
      { name: "window", label: "A text over the model's length", options: ["is cut", "mean", "max"], names: ["is cut", "mean of its windows", "maximum of its windows"] },
      { name: "explain", label: "Show why: leave out each word in turn", tick: true, value: true },
    ],
    body: ({ text, pair, window }) => ({
      inputs: pair ? { text, text_pair: pair } : text,
      ...(window === "is cut" ? {} : { parameters: { window } }),
    }),
    show: (answer) => bars(best(answer).map((item) => [item.label, item.score])),
  },
  "/ner": {
    title: "Entities",
    fields: [{ name: "text", label: "Text", value: "Ada Lovelace wrote to Charles Babbage of Cambridge University from her house in London." }],
    body: ({ text }) => ({ inputs: text }),
    show: (answer, { text }) => spans(text, answer.map((item) => ({ ...item, name: item.entity_group ?? item.entity }))),
  },
  "/answer": {
    title: "Answer",
    fields: [
      { name: "context", label: "Passage", value: "The bridge was built in Porto in 1886 by a student of Eiffel. It was closed to trains in 1991, and repaired in 2010." },
      { name: "question", label: "Question", value: "When was the bridge built?", rows: 1 },
    ],
    body: ({ context, question }) => ({ inputs: { question, context }, parameters: { top_k: 4 } }),
    show: (answer, { context }) => {
      const found = [answer].flat();
      return [
        spans(context, found.slice(0, 1).filter((item) => item.answer).map((item) => ({ ...item, name: "best" }))),
        element("h3", {}, "It and its rivals"),
        bars(found.map((item) => [item.answer || "(no answer)", item.score])),
      ];
    },
  },
  "/fill-mask": {
    title: "Fill mask",
    fields: [{ name: "text", label: "Text with the model's mask", value: "The king of [MASK] died in 1066, and his [MASK] came from France.", mask: true }],
    body: ({ text }) => ({ inputs: text }),
    show: (answer) => (Array.isArray(answer[0]) ? answer : [answer]).flatMap((mask, i) => [
      element("h3", {}, `Mask ${i + 1}`), bars(mask.map((item) => [item.token_str, item.score])),
    ]),
  },
  "/zero-shot": {
    title: "Zero-shot",
    fields: [
      { name: "text", label: "Text", value: "The new phone has a better camera." },
      { name: "labels", label: "Labels, one a line", value: "technology\npolitics\nsports" },
    ],
    body: ({ text, labels }) => ({ inputs: text, parameters: { candidate_labels: lines(labels) } }),
    show: (answer) => bars(pairsOf(answer)),
  },
  "/similarity": {
    title: "Similarity",
    fields: [{ name: "texts", label: "Sentences, one a line (at most 12)", value: "A warm and funny film.\nThe movie made me laugh.\nThe bridge was built in 1886.\nEngineers opened it to trains that year." }],
    requests: ({ texts }) => lines(texts).slice(0, 12).map((source, _, all) => ({ inputs: { source_sentence: source, sentences: all } })),
    body: ({ texts }) => { const all = lines(texts); return { inputs: { source_sentence: all[0] ?? "", sentences: all } }; },
    show: (answers, { texts }) => similarityMap(lines(texts).slice(0, 12), answers),
  },
  "/rerank": {
    title: "Rerank",
    fields: [
      { name: "query", label: "Query", value: "What is a panda?", rows: 1 },
      { name: "texts", label: "Texts, one a line", value: "A panda is a bear of China.\nThe bridge was built in 1886.\nPandas eat bamboo." },
    ],
    body: ({ query, texts }) => ({ query, texts: lines(texts) }),
    show: (answer, { texts }) => rankedTexts(answer.map((item) => [lines(texts)[item.index], item.score])),
  },
  "/choose": {
    title: "Choose",
    fields: [
      { name: "prompt", label: "Question or beginning", value: "He put the kettle on, and", rows: 1 },
      { name: "choices", label: "Choices, one a line", value: "made himself a cup of tea.\nflew to the moon." },
    ],
    body: ({ prompt, choices }) => ({ inputs: { prompt, choices: lines(choices) } }),
    show: (answer) => bars(answer.map((item) => [item.text, item.score])),
  },
  "/embed": {
    title: "Embed",
    fields: [{ name: "text", label: "Text", value: "A warm and funny film." }],
    body: ({ text }) => ({ inputs: [text] }),
    show: (answer) => element("p", { class: "text" }, `${answer[0].length} numbers: ${answer[0].slice(0, 12).map((x) => x.toFixed(3)).join(", ")}, and so on`),
  },
  "/attention": {
    title: "Attention",
    fields: [
      { name: "text", label: "Text", value: "The animal did not cross the street because it was too tired.", rows: 2 },
      { name: "pair", label: "Second text", value: "", rows: 1 },
      { name: "layer", label: "Layer", numbers: (model) => (model.attention_heads ?? [1]).length },
    ],
    body: ({ text, pair, layer }) => ({
      inputs: pair ? { text, text_pair: pair } : text, parameters: { output_attentions: true, layers: [Number(layer)] },
    }),
    show: (answer) => attentionMap(answer.tokens, answer.attentions[0]),
  },
};

const best = (answer) => (Array.isArray(answer[0]) ? answer[0] : answer);
const pairsOf = (answer) => Array.isArray(answer) ? answer.map((item) => [item.label, item.score]) : answer.labels.map((label, i) => [label, answer.scores[i]]);

let key = "";
let path = "";
let models = [];

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

async function get(where) {
  const response = await fetch(where.replace(/^\//, ""), { headers: headers() });
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const found = await response.json().catch(() => ({}));
  const error = new Error(found.error ?? `The service answered with status ${response.status}.`);
  if (response.status === 401) $("key-box").open = true;
  return error;
}

async function post(where, body) {
  const start = performance.now();
  const response = await fetch(where.replace(/^\//, ""), { method: "POST", headers: headers(), body: JSON.stringify(body) });
  if (!response.ok) throw await problemOf(response);
  const text = await response.text();
  return { answer: JSON.parse(text), text, headers: response.headers, ms: performance.now() - start };
}

function tell(error) {
  $("problem").textContent = error === null ? "" : error.message;
  $("problem").hidden = error === null;
}

async function load() {
  try {
    models = await (await get("/models")).json();
    tell(null);
  } catch (error) {
    tell(error);
    models = [];
  }
  const served = new Set(models.flatMap((model) => model.endpoints ?? []));
  const offered = Object.keys(TASKS).filter((each) => served.has(each));
  $("tabs").replaceChildren(...offered.map((each) => element("button", {
    role: "tab", type: "button", id: `tab-${each.slice(1)}`, "aria-controls": "task", onclick: () => choose(each), onkeydown: (event) => walk(event, offered),
  }, TASKS[each].title)));
  if (offered.length === 0 && models.length > 0) tell(new Error("No loaded model answers a task that this page has a form for."));
  if (offered.length > 0) choose(offered.includes(location.hash.replace("#", "/")) ? location.hash.replace("#", "/") : offered[0]);
}

function walk(event, offered) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  choose(offered[(offered.indexOf(path) + step + offered.length) % offered.length]);
  $(`tab-${path.slice(1)}`).focus();
}

function choose(chosen) {
  path = chosen;
  history.replaceState(null, "", `#${path.slice(1)}`);
  for (const tab of $("tabs").children) {
    const selected = tab.id === `tab-${path.slice(1)}`;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  $("task").setAttribute("aria-labelledby", `tab-${path.slice(1)}`);
  const fitting = models.filter((model) => (model.endpoints ?? []).includes(path));
  const usual = fitting.find((model) => (model.default_of ?? []).includes(path)) ?? fitting[0];
  const fields = TASKS[path].fields.map((field) => inputOf(field, usual));
  const choice = element("label", {}, "Model", element("select", { name: "model" }, ...fitting.map((model) => element("option", {
    value: model.name, ...(model === usual ? { selected: "" } : {}),
  }, `${model.name} (${model.provider}/${model.precision}, up to ${model.limits.max_tokens} tokens)`))));
  $("form").replaceChildren(choice, ...fields, element("button", { class: "run", type: "submit" }, "Run"));
  $("answer").hidden = true;
}

function inputOf(field, model) {
  if (field.numbers) {
    const numbers = Array.from({ length: field.numbers(model) }, (_, i) => String(i));
    return inputOf({ ...field, numbers: undefined, options: numbers, names: numbers.map((i) => `${i}${i === "0" ? ", the first" : ""}`) }, model);
  }
  if (field.tick) return element("label", { class: "tick" }, element("input", { type: "checkbox", name: field.name, ...(field.value ? { checked: "" } : {}) }), field.label);
  if (field.options) {
    return element("label", {}, field.label, element("select", { name: field.name }, ...field.options.map((option, i) => element("option", { value: option }, field.names[i]))));
  }
  const value = field.mask ? field.value.replaceAll("[MASK]", model.mask_token ?? "[MASK]") : field.value;
  const area = element("textarea", { name: field.name, rows: String(field.rows ?? 3), onkeydown: runOnEnter });
  area.value = value;
  return element("label", {}, field.label, area);
}

const runOnEnter = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit(); };

async function run(event) {
  event.preventDefault();
  const task = TASKS[path];
  const values = Object.fromEntries(new FormData($("form")));
  const usual = models.find((model) => (model.default_of ?? []).includes(path));
  // the path of a model goes by what a body asks for
  const where = usual?.name === values.model ? path : `/models/${encodeURIComponent(values.model)}`;
  const button = $("form").querySelector(".run");
  button.disabled = true;
  try {
    const bodies = task.requests ? task.requests(values) : [task.body(values)];
    const done = await Promise.all(bodies.map((body) => post(where, body)));
    tell(null);
    show(task, values, where, bodies[0], done);
    if (values.explain && path === "/classify") await explain(where, values, done[0]);
  } catch (error) {
    $("answer").hidden = true;
    tell(error);
  } finally {
    button.disabled = false;
  }
}

function show(task, values, where, body, done) {
  const { answer, text, headers: received, ms } = done[0];
  const notes = (received.get("x-hf-warning") ?? "").split(/, (?=[a-z]+; )/).filter(Boolean);
  const cut = received.get("x-truncated");
  $("answer").hidden = false;
  $("status").textContent = `${received.get("x-model")} answered in ${ms.toFixed(1)} ms as this page measures it`;
  $("notes").replaceChildren(...notes.map((note) => element("li", {}, note)), ...(cut && notes.length === 0 ? [element("li", {}, `${cut} input was cut`)] : []));
  $("result").replaceChildren(...[task.show(task.requests ? done.map((one) => one.answer) : answer, values)].flat());
  $("reasons").replaceChildren();
  $("timing").replaceChildren(timingBar(received.get("server-timing") ?? "", ms));
  $("raw").textContent = text;
  showCode(where, body);
}

function showCode(where, body) {
  const url = new URL(where.replace(/^\//, ""), document.baseURI.split("#")[0]).href;
  const languages = { curl: inCurl, Python: inPython, JavaScript: inJavaScript };
  const choice = (name) => {
    for (const button of $("languages").children) button.setAttribute("aria-pressed", String(button.textContent === name));
    $("code").textContent = languages[name](url, body, Boolean(key));
  };
  $("languages").replaceChildren(...Object.keys(languages).map((name) => element("button", { type: "button", onclick: () => choice(name) }, name)));
  choice("curl");
}

// Which words drove the label: its score with each word left out, all variants as one request, which the service runs in a batch.
async function explain(where, values, whole) {
  const words = [...values.text.matchAll(/\S+/g)].map((match) => ({ start: match.index, end: match.index + match[0].length }));
  if (words.length < 2 || words.length > 100) {
    $("reasons").replaceChildren(element("p", {}, `Words are left out one by one of texts of 2 to 100 words; this one has ${words.length}.`));
    return;
  }
  const label = best(whole.answer)[0];
  const without = words.map(({ start, end }) => (values.text.slice(0, start) + values.text.slice(end)).replace(/\s+/g, " ").trim());
  const { answer } = await post(where, { inputs: without.map((text) => (values.pair ? { text, text_pair: values.pair } : text)) });
  const scores = answer.map((each) => each.find((item) => item.label === label.label).score);
  $("reasons").replaceChildren(...reasons(values.text, words, label, scores));
}

$("form").addEventListener("submit", run);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  load();
});
await load();
watchLoad($("load"), () => get("/metrics"));
