// Calls each method of @huggingface/inference for the tasks of the service: `node calls.mjs URL`. Prints JSON: name -> {result}, or {error}.
import { InferenceClient, InferenceClientEndpoint } from "@huggingface/inference";

const url = process.argv[2];
const sent = [];
const options = {
  retry_on_error: false,
  fetch: (address, init) => {
    sent.push({ address, method: init.method, agent: init.headers["User-Agent"], body: init.body });
    return fetch(address, init);
  },
};
const at = (path) => new InferenceClientEndpoint("", { endpointUrl: url + path, ...options });
const plain = new InferenceClient("", options);
const review = "A warm, funny film.";
const labels = { candidate_labels: ["film", "bridge"] };
const mask = "The king of [MASK] died in 1066.";
const masks = "The [MASK] of [MASK] died in 1066.";

const calls = {
  classify: () => at("/classify").textClassification({ inputs: review, parameters: { top_k: 1 } }),
  classifyByUrl: () => plain.textClassification({ endpointUrl: url + "/models/sentiment", inputs: review }),
  classifyList: () => at("/classify").textClassification({ inputs: [review] }),
  classifyLists: () => at("/classify").textClassification({ inputs: [review, review] }),
  entities: () => at("/ner").tokenClassification({ inputs: "Ada Lovelace lived in London." }),
  entitiesList: () => at("/ner").tokenClassification({ inputs: ["Ada Lovelace lived in London."] }),
  entitiesLists: () => at("/ner").tokenClassification({ inputs: ["Ada.", "London."] }),
  tokens: () => at("/ner").tokenClassification({ inputs: "Ada lived in London.", parameters: { aggregation_strategy: "none" } }),
  answer: () => at("/answer").questionAnswering({ inputs: { question: "Who lived there?", context: "Ada lived there." } }),
  answerList: () => at("/answer").questionAnswering({ inputs: [{ question: "Who lived there?", context: "Ada lived there." }], parameters: { top_k: 2 } }),
  fill: () => at("/fill-mask").fillMask({ inputs: mask, parameters: { top_k: 2 } }),
  fillTwo: () => at("/fill-mask").fillMask({ inputs: masks, parameters: { top_k: 2 } }),
  fillTwoInList: () => at("/fill-mask").fillMask({ inputs: [masks], parameters: { top_k: 2 } }),
  fillNone: () => at("/fill-mask").fillMask({ inputs: "No mask." }),
  embed: () => at("/embed").featureExtraction({ inputs: review, normalize: true, dimensions: 4 }),
  embedLists: () => at("/embed").featureExtraction({ inputs: [review, "A bridge."] }),
  similarity: () => at("/similarity").sentenceSimilarity({ inputs: { source_sentence: review, sentences: ["A bridge.", review] } }),
  zeroShot: () => at("/zero-shot").zeroShotClassification({ inputs: review, parameters: labels }),
  zeroShotList: () => at("/zero-shot").zeroShotClassification({ inputs: [review], parameters: labels }),
  zeroShotByModel: () => at("/models/nli").zeroShotClassification({ inputs: [review], parameters: labels }),
  zeroShotLists: () => at("/zero-shot").zeroShotClassification({ inputs: [review, review], parameters: labels }),
  wrongParameter: () => at("/classify").textClassification({ inputs: review, parameters: { topk: 1 } }),
  wrongKey: () => at("/classify").textClassification({ inputs: review, top_k: 1 }),
  wrongPath: () => at("/clasify").textClassification({ inputs: review }),
};

const results = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    results[name] = { result: await call() };
  } catch (error) {
    results[name] = { error: { kind: error.name, message: error.message, status: error.httpResponse?.status ?? null } };
  }
}
console.log(JSON.stringify({ results, sent }));
