// One form a task: its fields and examples, the body that they make, and how its answer is shown. The page itself is playground.js.
import { element, bars, spans, similarityMap, percent } from "./views.js";
import { reasons } from "./reasons.js";
import { attentionMap } from "./attention.js";

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const labelsOf = (answer) => (Array.isArray(answer[0]) ? answer[0] : answer);
const score = (value) => (value >= 0 && value <= 1 ? percent(value) : value.toFixed(3));

// A text of so many towns; 30 are about 850 tokens, more than most models take at once.
const TOWNS = "Leeds Lyon Turin Bremen Cork Dundee Ghent Basel Lille Porto Bergen Graz Seville Verona Derby Exeter York Bath Oxford Nantes Toulouse Bologna Genoa Naples Hamburg Dresden Leipzig Zurich Geneva Lisbon".split(" ");
const chronicle = (count) => TOWNS.slice(0, count).map((town, i) => `In ${1851 + 3 * i} the town of ${town} opened a railway station, and its first train, drawn by a small engine from Glasgow, was late by ${7 + i} minutes.`).join(" ");
const REVIEW = "The plot is thin and the ending drags, but the cast is a delight.";
const LONG_REVIEW = `${Array.from({ length: 60 }, (_, i) => `Scene ${i + 1} is slow and far too loud.`).join(" ")} In the end I loved it.`;

// Of each path:
//   title, about   its tab, and what it does
//   fields         the first has the text that is marked; `numbers` are options that go by the model
//   examples       values of fields, and for which models
//   texts          by the names that the answer's headers and explanations use, what the model read
//   body, requests what is sent: one request, or several
//   say            the answer in a few words, for who hears it
//   show           the answer
//   found          places in a text that are marked among its windows
//   why            which words drove the answer
export const FORMS = {
  "/classify": {
    title: "Classify",
    about: "Gives a text, or a pair of texts, a label.",
    fields: [
      { name: "text", label: "Text", value: REVIEW },
      { name: "pair", label: "Second text, for models of pairs", value: "", rows: 1 },
      { name: "window", label: "If the text is too long", options: ["is cut", "mean", "max"], names: ["cut it", "take the mean of its windows", "take the maximum of its windows"] },
      { name: "explain", label: "Show why, by leaving out each word", tick: true, value: true },
    ],
    examples: [
      { name: "A review", values: { text: REVIEW, pair: "" }, suits: (model) => !isPairs(model) },
      { name: "Does one follow from the other?", values: { text: "A man is playing a guitar on a stage.", pair: "Someone makes music." }, suits: (model) => isPairs(model) },
      { name: "Too long", values: { text: LONG_REVIEW, pair: "" }, suits: (model) => !isPairs(model) },
    ],
    texts: ({ text, pair }) => (pair ? { text, text_pair: pair } : { "": text }),
    body: ({ text, pair, window, explain }) => {
      // windows are not explained, and neither is a text of more words than are left out
      const parameters = { ...(window === "is cut" ? {} : { window }), ...(explain && window === "is cut" && countWords(text + pair) <= MOST_WORDS ? { explain: true } : {}) };
      return { inputs: pair ? { text, text_pair: pair } : text, ...(Object.keys(parameters).length > 0 ? { parameters } : {}) };
    },
    say: (answer) => `${labelsOf(answer)[0].label}, ${score(labelsOf(answer)[0].score)}`,
    show: (answer) => bars(labelsOf(answer).map((item) => [item.label, item.score])),
    why: (answer, values) => {
      const explained = labelsOf(answer).filter((item) => item.explanation);
      if (explained.length === 0 && values.explain) return [element("p", { class: "quiet" }, `Words are left out one by one of texts of up to ${MOST_WORDS} words that are read at once.`)];
      return explained.flatMap((item) => reasons(`Why ${item.label}?`, item, FORMS["/classify"].texts(values)));
    },
  },
  "/ner": {
    title: "Entities",
    about: "Finds persons, places and organizations.",
    fields: [{ name: "text", label: "Text", value: "Ada Lovelace wrote to Charles Babbage of Cambridge University from her house in London." }],
    examples: [
      { name: "A sentence", values: { text: "Ada Lovelace wrote to Charles Babbage of Cambridge University from her house in London." } },
      { name: "A long text, in windows", values: { text: chronicle(30) } },
    ],
    texts: ({ text }) => ({ "": text }),
    body: ({ text }) => ({ inputs: text }),
    say: (answer) => `${answer.length} ${answer.length === 1 ? "entity" : "entities"}`,
    show: (answer, { text }) => spans(text, answer.map((item) => ({ ...item, name: item.entity_group ?? item.entity }))),
    found: (answer) => answer,
  },
  "/answer": {
    title: "Answer",
    about: "Finds the place in a passage that answers a question.",
    fields: [
      { name: "context", label: "Passage", value: "The bridge was built in Porto in 1886 by a student of Eiffel. It was closed to trains in 1991, and repaired in 2010.", rows: 4 },
      { name: "question", label: "Question", value: "When was the bridge built?", rows: 1 },
      { name: "explain", label: "Show why, by leaving out each word", tick: true, value: true },
    ],
    examples: [
      { name: "A short passage", values: { context: "The bridge was built in Porto in 1886 by a student of Eiffel. It was closed to trains in 1991, and repaired in 2010.", question: "When was the bridge built?" } },
      { name: "A long one, in windows", values: { context: chronicle(30), question: "When did Bologna open its station?", explain: false } },
    ],
    texts: ({ context, question }) => ({ question, context }),
    body: ({ context, question, explain }) => ({ inputs: { question, context }, parameters: { top_k: 4, ...(explain ? { explain: true } : {}) } }),
    say: (answer) => `${[answer].flat()[0].answer || "no answer"}, ${score([answer].flat()[0].score)}`,
    show: (answer, { context }) => {
      const found = [answer].flat();
      return [
        spans(context, found.slice(0, 1).filter((item) => item.answer).map((item) => ({ ...item, name: "best" }))),
        element("h3", {}, "It and its rivals"),
        bars(found.map((item) => [item.answer || "(no answer)", item.score])),
      ];
    },
    found: (answer) => [answer].flat().slice(0, 1).filter((item) => item.answer),
    why: (answer, values) => {
      const [best] = [answer].flat();
      return best.explanation ? reasons(`Why ${best.answer ? `“${best.answer}”` : "no answer"}?`, best, FORMS["/answer"].texts(values)) : [];
    },
  },
  "/fill-mask": {
    title: "Fill mask",
    about: "Says which words fit in the place of a masked one.",
    fields: [{ name: "text", label: "Text with the model's mask", value: "The king of [MASK] died in 1066, and his [MASK] came from France.", mask: true }],
    body: ({ text }) => ({ inputs: text }),
    say: (answer) => (Array.isArray(answer[0]) ? answer : [answer]).map((mask) => mask[0].token_str).join(", "),
    show: (answer) => (Array.isArray(answer[0]) ? answer : [answer]).flatMap((mask, i, all) => [
      ...(all.length > 1 ? [element("h3", {}, `Mask ${i + 1}`)] : []), bars(mask.map((item) => [item.token_str, item.score])),
    ]),
  },
  "/zero-shot": {
    title: "Zero-shot",
    about: "Sorts a text by labels of your own.",
    fields: [
      { name: "text", label: "Text", value: "The new phone has a better camera." },
      { name: "labels", label: "Labels, one a line", value: "technology\npolitics\nsports" },
    ],
    body: ({ text, labels }) => ({ inputs: text, parameters: { candidate_labels: lines(labels) } }),
    say: (answer) => `${scoresOf(answer)[0][0]}, ${percent(scoresOf(answer)[0][1])}`,
    show: (answer) => bars(scoresOf(answer)),
  },
  "/similarity": {
    title: "Similarity",
    about: "Says how alike sentences are in meaning.",
    fields: [{ name: "texts", label: "Sentences, one a line, at most 12", value: "A warm and funny film.\nThe movie made me laugh.\nThe bridge was built in 1886.\nEngineers opened it to trains that year.", rows: 5 }],
    requests: ({ texts }) => lines(texts).slice(0, 12).map((source, _, all) => ({ inputs: { source_sentence: source, sentences: all } })),
    body: ({ texts }) => { const all = lines(texts); return { inputs: { source_sentence: all[0] ?? "", sentences: all } }; },
    show: (answers, { texts }) => similarityMap(lines(texts).slice(0, 12), answers),
  },
  "/rerank": {
    title: "Rerank",
    about: "Sorts texts by how well they answer a query.",
    fields: [
      { name: "query", label: "Query", value: "What is a panda?", rows: 1 },
      { name: "texts", label: "Texts, one a line", value: "A panda is a bear of China.\nThe bridge was built in 1886.\nPandas eat bamboo." },
    ],
    body: ({ query, texts }) => ({ query, texts: lines(texts) }),
    say: (answer, { texts }) => lines(texts)[answer[0].index],
    show: (answer, { texts }) => bars(answer.map((item) => [lines(texts)[item.index], item.score])),
  },
  "/choose": {
    title: "Choose",
    about: "Says which choice goes with a question or a beginning.",
    fields: [
      { name: "prompt", label: "Question or beginning", value: "He put the kettle on, and", rows: 1 },
      { name: "choices", label: "Choices, one a line", value: "made himself a cup of tea.\nflew to the moon." },
    ],
    body: ({ prompt, choices }) => ({ inputs: { prompt, choices: lines(choices) } }),
    say: (answer) => answer[0].text,
    show: (answer) => bars(answer.map((item) => [item.text, item.score])),
  },
  "/embed": {
    title: "Embed",
    about: "Turns a text into a vector.",
    fields: [{ name: "text", label: "Text", value: "A warm and funny film." }],
    body: ({ text }) => ({ inputs: [text] }),
    say: (answer) => `${answer[0].length} numbers`,
    show: (answer) => element("p", { class: "text numbers" }, `${answer[0].length} numbers: ${answer[0].slice(0, 12).map((x) => x.toFixed(3)).join(", ")}, and so on`),
  },
  "/attention": {
    title: "Attention",
    about: "Shows which tokens look at which, by layer and head.",
    fields: [
      { name: "text", label: "Text", value: "The animal did not cross the street because it was too tired.", rows: 2 },
      { name: "pair", label: "Second text", value: "", rows: 1 },
      { name: "layer", label: "Layer", numbers: (model) => (model.attention_heads ?? [1]).length },
    ],
    body: ({ text, pair, layer }) => ({
      inputs: pair ? { text, text_pair: pair } : text, parameters: { output_attentions: true, layers: [Number(layer)] },
    }),
    say: (answer) => `${answer.tokens.length} tokens`,
    show: (answer) => attentionMap(answer.tokens, answer.attentions[0]),
  },
};

const MOST_WORDS = 384; // the service's own limit; it counts words more exactly
const countWords = (text) => (text.match(/[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? []).length;
const isPairs = (model) => (model.labels ?? []).some((label) => label.toLowerCase().startsWith("entail"));
const scoresOf = (answer) => (Array.isArray(answer) ? answer.map((item) => [item.label, item.score]) : answer.labels.map((label, i) => [label, answer.scores[i]]));
