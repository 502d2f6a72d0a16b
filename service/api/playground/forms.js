// Turns a form's values into request bodies, and answers into a view. The forms are data, in forms.json.
// In a field, `to` is the path of its value in the body, `each` a path for each line in a request of its own, `most` the maximum number of
// lines, `unless` a field whose value excludes a tick, `with` a tick that a slider needs, `most_words` the maximum words for a tick, `counted` a list of the model's description.
import { element, bars, spans, similarityMap, percent } from "./views.js";
import { reasons } from "./reasons.js";
import { attentionMap } from "./attention.js";

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const score = (value) => (value >= 0 && value <= 1 ? percent(value) : value.toFixed(3));
const countWords = (text) => (text.match(/[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? []).length; // an estimate; the service counts exactly
const isPairs = (model) => (model.labels ?? []).some((label) => label.toLowerCase().startsWith("entail"));

export const fitsModel = (example, model) => example.pairs === null || example.pairs === isPairs(model);
export const sendsOneRequestPerLine = (form) => form.fields.some((field) => field.each);

// The value that is sent for a field; undefined to send nothing.
function valueOf(field, values, form) {
  const value = values[field.name];
  if (field.kind === "lines") return lines(value).slice(0, field.most || undefined);
  if (field.kind === "number") return [Number(value)];
  if (field.kind === "slider") return values[field.with] ? Number(value) : undefined;
  if (field.kind === "choice" || field.optional) return value || undefined;
  if (field.kind === "text") return value;
  const words = form.fields.filter((other) => other.kind === "text").map((other) => countWords(values[other.name])).reduce((a, b) => a + b, 0);
  return value && !values[field.unless] && (!field.most_words || words <= field.most_words) ? true : undefined;
}

function put(body, path, value) {
  const keys = path.split(".");
  const last = keys.pop();
  keys.reduce((at, key) => (at[key] ??= {}), body)[last] = value;
}

// One body, or one per line if a field says so.
export function bodiesOf(form, values) {
  const body = {};
  for (const field of form.fields) {
    const value = valueOf(field, values, form);
    if (value !== undefined) put(body, field.to, value);
  }
  for (const [name, value] of Object.entries(form.parameters)) put(body, `parameters.${name}`, value);
  if (Object.keys(body.inputs ?? {}).join() === "text") body.inputs = body.inputs.text;
  const repeated = form.fields.find((field) => field.each);
  return repeated === undefined ? [body] : valueOf(repeated, values, form).map((line) => {
    const one = structuredClone(body);
    put(one, repeated.each, line);
    return one;
  });
}

// The texts that the model read of a body, by the names in the answer's headers and explanations.
export function textsOf({ inputs }) {
  return typeof inputs === "string" ? { "": inputs } : Object.fromEntries(Object.entries(inputs ?? {}).filter(([, value]) => typeof value === "string"));
}

// Functions of a view:
//   show    shows the answer
//   say     the answer in a few words, for screen readers
//   items   the results that have a score and perhaps an explanation, best first; `name` is their label
//   found   the spans of the first text that are marked in its windows
const masksOf = (answer) => (Array.isArray(answer[0]) ? answer : [answer]);
const BARS = {
  items: (answer) => (Array.isArray(answer[0]) ? answer[0] : answer),
  name: (item, body) => item.label ?? item.text ?? body.texts[item.index],
  say: (answer, body) => `${BARS.name(BARS.items(answer)[0], body)} (${score(BARS.items(answer)[0].score)})`,
  show: (answer, body) => bars(BARS.items(answer).map((item) => [BARS.name(item, body), item.score])),
};
const ANSWERS = {
  items: (answer) => [answer].flat(),
  name: (item) => (item.answer ? `“${item.answer}”` : "no answer"),
  say: (answer) => `${ANSWERS.items(answer)[0].answer || "no answer"} (${score(ANSWERS.items(answer)[0].score)})`,
  show: (answer, body) => [
    spans(body.inputs.context, ANSWERS.found(answer).map((item) => ({ ...item, name: "best" }))),
    element("h3", {}, "Top answers"),
    bars(ANSWERS.items(answer).map((item) => [item.answer || "(no answer)", item.score])),
  ],
  found: (answer) => ANSWERS.items(answer).slice(0, 1).filter((item) => item.answer),
};
export const VIEWS = {
  bars: BARS,
  answers: ANSWERS,
  entities: {
    say: (answer) => `${answer.length} ${answer.length === 1 ? "entity" : "entities"}`,
    show: (answer, body) => spans(body.inputs, answer.map((item) => ({ ...item, name: item.entity_group ?? item.entity }))),
    found: (answer) => answer,
  },
  masks: {
    say: (answer) => masksOf(answer).map((mask) => mask[0].token_str).join(", "),
    show: (answer) => masksOf(answer).flatMap((mask, i, all) => [
      ...(all.length > 1 ? [element("h3", {}, `Mask ${i + 1}`)] : []), bars(mask.map((item) => [item.token_str, item.score])),
    ]),
  },
  similarities: { show: (answers, body) => similarityMap(body.inputs.sentences, answers) },
  vectors: {
    say: (answer) => `${answer[0].length} numbers`,
    show: (answer) => element("p", { class: "text numbers" }, `${answer[0].length} numbers: ${answer[0].slice(0, 12).map((x) => x.toFixed(3)).join(", ")}, and so on`),
  },
  attention: {
    say: (answer) => `${answer.tokens.length} tokens`,
    show: (answer) => attentionMap(answer.tokens, answer.attentions[0]),
  },
  json: { show: (answer) => element("p", { class: "text" }, JSON.stringify(answer, null, 1)) },
};

// The words that influenced the answer most, if the form requests them.
export function explanationView(form, answer, body, values) {
  const view = VIEWS[form.view];
  const explained = view.items?.(answer).filter((item) => item.explanation) ?? [];
  const field = form.fields.find((candidate) => candidate.most_words);
  if (explained.length === 0 && field && values.explain) {
    const tooLong = `This text is too long to explain: it has over ${field.most_words} words.`;
    return [element("p", { class: "quiet" }, values[field.unless] ? "There is no explanation of a text that is read in windows." : tooLong)];
  }
  return explained.flatMap((item) => reasons(`Why ${view.name(item, body)}?`, item, textsOf(body)));
}
