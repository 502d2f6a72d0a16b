// The playground: selects a task, sends the form's request and shows the answer. The service has the forms; forms.js has the views.
import { element } from "./views.js";
import { VIEWS, bodiesOf, explanationView, fitsModel, sendsOneRequestPerLine, textsOf } from "./forms.js";
import { windowsView } from "./windows.js";
import { decisionIn, decisionText, reliability } from "./decisions.js";
import { timingBar } from "./timing.js";
import { inCurl, inPython, inJavaScript } from "./snippets.js";
import { watchLoad } from "./load.js";

const $ = (id) => document.getElementById(id);

let key = "";
let path = "";
let models = [];
let forms = {};

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

async function get(requestPath) {
  const response = await fetch(requestPath.replace(/^\//, ""), { headers: headers() });
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const found = await response.json().catch(() => ({}));
  if (response.status !== 401) return Object.assign(new Error(found.error ?? `The service answered with status ${response.status}.`), { status: response.status });
  $("key-box").open = true;
  return new Error(key ? "The service does not know this API key. Check the key above." : "This service needs an API key. Enter it above, under “API key”.");
}

async function post(requestPath, body) {
  const start = performance.now();
  const response = await fetch(requestPath.replace(/^\//, ""), { method: "POST", headers: headers(), body: JSON.stringify(body) });
  if (!response.ok) throw await problemOf(response);
  const text = await response.text();
  return { answer: JSON.parse(text), text, headers: response.headers, ms: performance.now() - start };
}

function showError(error) {
  $("problem").textContent = error === null ? "" : error.message;
  $("problem").hidden = error === null;
  if (error !== null) $("empty").hidden = $("answer").hidden = true;
  if (error !== null) $("problem").scrollIntoView({ block: "nearest" });
}

async function load() {
  try {
    forms = await (await get("/playground/forms.json")).json();
    const listed = await (await get("/models")).json();
    models = await Promise.all(listed.filter((model) => model.endpoints).map(async ({ name }) => (await get(`/models/${encodeURIComponent(name)}`)).json()));
    showError(null);
  } catch (error) {
    showError(error);
    models = [];
  }
  const served = new Set(models.flatMap((model) => model.endpoints));
  const offered = Object.keys(forms).filter((taskPath) => served.has(taskPath));
  $("tabs").replaceChildren(...offered.map((taskPath) => element("button", {
    role: "tab", type: "button", id: `tab-${taskPath.slice(1)}`, "aria-controls": "task", onclick: () => choose(taskPath), onkeydown: (event) => onTabKey(event, offered),
  }, forms[taskPath].title)));
  if (offered.length === 0 && models.length > 0) showError(new Error("No loaded model answers a task that this page has a form for."));
  if (offered.length > 0) choose(offered.includes(location.hash.replace("#", "/")) ? location.hash.replace("#", "/") : offered[0]);
}

function onTabKey(event, offered) {
  const here = offered.indexOf(path);
  const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: offered.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose(offered[(next + offered.length) % offered.length]);
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
  const fitting = models.filter((model) => model.endpoints.includes(path));
  const usual = fitting.find((model) => model.default_of.includes(path)) ?? fitting[0];
  const choice = element("label", {}, "Model", element("select", { name: "model", onchange: () => offerExamples(fitting) }, ...fitting.map((model) => element("option", {
    value: model.name, ...(model === usual ? { selected: "" } : {}),
  }, `${model.name} (${model.provider}/${model.precision}, up to ${model.limits.max_tokens} tokens)`))));
  const examples = element("div", { id: "examples", role: "group", "aria-label": "Examples" });
  const fields = forms[path].fields.map((field) => inputOf(field, usual));
  const send = element("div", { class: "send" }, element("button", { class: "run", type: "submit" }, "Run"), element("span", { class: "quiet keys" }, "or Ctrl + Enter"));
  $("form").replaceChildren(element("p", { class: "quiet" }, forms[path].about), choice, examples, ...fields, send);
  offerExamples(fitting);
  showError(null);
  $("answer").hidden = true;
  $("empty").hidden = false;
}

// Examples for the chosen model. A single example is not listed if the form already has it.
function offerExamples(fitting) {
  const model = fitting.find((candidate) => candidate.name === $("form").elements.model.value);
  const suiting = forms[path].examples.filter((example) => fitsModel(example, model));
  $("examples").replaceChildren(element("span", { class: "quiet" }, "Examples"), ...suiting.map((example) => element("button", { type: "button", onclick: () => fill(example.values) }, example.name)));
  $("examples").hidden = suiting.length === 0;
}

function fill(values) {
  for (const [name, value] of Object.entries(values)) {
    const input = $("form").elements[name];
    if (typeof value === "boolean") input.checked = value;
    else input.value = value;
  }
}

function inputOf(field, model) {
  if (field.kind === "tick") return element("label", { class: "tick" }, element("input", { type: "checkbox", name: field.name, ...(field.value ? { checked: "" } : {}) }), field.label);
  if (field.kind === "choice" || field.kind === "number") {
    const options = field.kind === "choice" ? field.options : (model[field.counted] ?? [1]).map((_, i) => [String(i), i === 0 ? "0, the first" : String(i)]);
    return element("label", {}, field.label, element("select", { name: field.name }, ...options.map(([value, name]) => element("option", { value }, name))));
  }
  if (field.kind === "slider") {
    const value = model.calibration?.thresholds.find((threshold) => threshold.label === null)?.threshold ?? 0.5;
    const shown = element("output", {}, value.toFixed(2));
    const slide = (event) => { shown.textContent = Number(event.target.value).toFixed(2); };
    const rerun = () => { if (!$("answer").hidden && $("form").elements[field.with].checked) $("form").requestSubmit(); };
    return element("label", {}, field.label, element("input", {
      type: "range", name: field.name, min: "0", max: "1", step: "any", value: String(value), oninput: slide, onchange: rerun,
    }), shown);
  }
  const area = element("textarea", { name: field.name, rows: String(field.rows), onkeydown: runOnEnter });
  area.value = field.value.replaceAll("[MASK]", model.mask_token ?? "[MASK]");
  return element("label", {}, field.label, area);
}

const runOnEnter = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit(); };

async function run(event) {
  event.preventDefault();
  const form = forms[path];
  const button = $("form").querySelector(".run");
  if (button.disabled) return; // Ctrl + Enter during a request
  const values = Object.fromEntries(new FormData($("form")));
  const usual = models.find((model) => model.default_of.includes(path));
  // the path of a model selects the task by the body's fields
  const requestPath = usual?.name === values.model ? path : `/models/${encodeURIComponent(values.model)}`;
  const focused = document.activeElement === button;
  button.disabled = true;
  button.textContent = "Running…";
  try {
    const bodies = bodiesOf(form, values);
    const done = await Promise.all(bodies.map((body) => post(requestPath, body)));
    showError(null);
    show(form, values, requestPath, bodies[0], done);
  } catch (error) {
    showError(error);
  } finally {
    button.disabled = false;
    button.textContent = "Run";
    if (focused) button.focus(); // a disabled button loses the focus
  }
}

function show(form, values, requestPath, body, done) {
  const { text, headers: received, ms } = done[0];
  const decision = decisionIn(done[0].answer);
  const answer = decision ? decision.scores : done[0].answer;
  const view = VIEWS[form.view];
  const all = sendsOneRequestPerLine(form) ? done.map((one) => one.answer) : answer;
  const notes = (received.get("x-hf-warning") ?? "").split(/, (?=[a-z]+; )/).filter(Boolean);
  $("empty").hidden = true;
  $("answer").hidden = false;
  const statusText = `${received.get("x-model")} answered in ${ms.toFixed(1)} ms${view.say ? `: ${view.say(all, body)}` : ""}`;
  $("status").textContent = statusText;
  $("spoken").textContent = statusText; // the element is always on the page, because a screen reader needs that
  $("notes").replaceChildren(...notes.map((note) => element("li", {}, note)));
  const model = models.find((candidate) => candidate.name === values.model);
  const decided = decision ? [element("p", { class: "decision" }, decisionText(decision, body))] : [];
  $("result").replaceChildren(...decided, ...[view.show(all, body)].flat(), ...reliability(path === "/zero-shot" ? null : model.calibration));
  $("read").replaceChildren(...windowsView(received.get("x-windows"), textsOf(body), view.found?.(answer) ?? [], received.has("x-truncated")));
  $("reasons").replaceChildren(...explanationView(form, answer, body, values));
  $("timing").replaceChildren(...timingBar(received.get("server-timing") ?? "", ms));
  $("raw").textContent = text;
  showCode(requestPath, body);
  for (const box of $("answer").querySelectorAll(".text")) {
    const mark = box.querySelector("mark");
    if (mark) box.scrollTop = mark.offsetTop - 40;
    if (box.scrollHeight > box.clientHeight) box.tabIndex = 0; // so that keys can scroll it
  }
  if ($("answer").getBoundingClientRect().top > innerHeight - 120) $("answer").scrollIntoView(); // on a phone it is below the form
}

function showCode(requestPath, body) {
  const url = new URL(requestPath.replace(/^\//, ""), document.baseURI.split("#")[0]).href;
  const languages = { curl: inCurl, Python: inPython, JavaScript: inJavaScript };
  const choice = (name) => {
    for (const button of $("languages").children) button.setAttribute("aria-pressed", String(button.textContent === name));
    $("code").textContent = languages[name](url, body, Boolean(key));
  };
  $("languages").replaceChildren(...Object.keys(languages).map((name) => element("button", { type: "button", onclick: () => choice(name) }, name)));
  choice("curl");
}

// Without access to the clipboard, as over plain HTTP from another machine, the page selects the text so that the user can copy it.
async function copy() {
  try {
    await navigator.clipboard.writeText($("code").textContent);
    $("copied").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("code"));
    $("copied").textContent = "Selected: copy it with your keyboard";
  }
  setTimeout(() => { $("copied").textContent = ""; }, 3000);
}

$("copy").addEventListener("click", copy);
$("form").addEventListener("submit", run);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  load();
});
await load();
watchLoad($("load"), () => get("/metrics"), (works) => { $("metrics").hidden = $("load-box").hidden = !works; });
