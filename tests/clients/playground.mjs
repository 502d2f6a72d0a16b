// Uses the playground in Chromium as a person does, and prints what it shows as JSON: node playground.mjs URL CHROMIUM [KEY]
import { chromium } from "playwright-core";

const [url, executablePath, key] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
const page = await browser.newPage();
const seen = { errors: [], outside: [], tasks: {}, explains: false };
page.on("pageerror", (error) => seen.errors.push(error.message));
page.on("console", (message) => message.type() === "error" && !message.text().startsWith("Failed to load resource") && seen.errors.push(message.text()));
page.on("request", (request) => request.url().startsWith(url) || request.url().startsWith("data:") || seen.outside.push(request.url()));

const run = async () => {
  await page.keyboard.press("Control+Enter");
  await page.waitForSelector("#answer:not([hidden]), #problem:not([hidden])");
  await page.waitForFunction(() => !document.querySelector("button.run").disabled);
};
// Whether anything makes a phone scroll sideways.
const wide = async () => {
  const size = page.viewportSize();
  await page.setViewportSize({ width: 360, height: 700 });
  const found = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  await page.setViewportSize(size);
  return found;
};
const text = (selector) => page.locator(selector).innerText();
// Each stage of the time bar: its name, its milliseconds, and what it says about itself.
const stages = () => page.locator("#timing dl > div").evaluateAll((parts) => parts.map((part) => [
  part.querySelector("dt").textContent, parseFloat(part.querySelector("b").textContent), part.querySelector("small").textContent,
]));

await page.goto(url);
if (key) {
  await page.waitForSelector("#problem:not([hidden])");
  seen.refused = await text("#problem");
  await page.fill("#key", key);
  await page.keyboard.press("Enter");
}
await page.waitForSelector("[role=tab]");
await page.locator("[role=tab]").first().focus();
const count = await page.locator("[role=tab]").count();
for (let i = 0; i < count; i += 1) {
  const name = await text("[role=tab][aria-selected=true]");
  const why = page.locator("[name=explain]");
  if (await why.count()) {
    seen.explains ||= await why.isChecked();
    await why.check();
  }
  await page.locator("#form textarea").first().focus();
  await run();
  seen.tasks[name] = {
    result: await text("#result"), timing: await text("#timing"), code: await text("#code"), reasons: await text("#reasons"), read: await text("#read"),
    spoken: await page.locator("[role=status]").first().textContent(), wide: await wide(), stages: await stages(),
  };
  await page.locator("[role=tab][aria-selected=true]").focus();
  await page.keyboard.press("ArrowRight");
}

await page.locator("#tab-attention").click();
await page.locator("#form select[name=layer]").selectOption("1");
await page.locator("#form textarea").first().focus();
await run();
await page.locator("#result select").selectOption("2");
seen.attention = { caption: await text("#result caption"), row: await text("#result tbody tr >> nth=1"), heads: await page.locator("#result option").count() };

await page.locator("#tab-classify").click();
await page.locator("#form select[name=model]").selectOption("calibrated");
await page.locator("[name=decide]").check();
seen.decisions = [];
for (const score of ["0.01", "0.99"]) {
  await page.locator("[name=threshold]").evaluate((slider, value) => { slider.value = value; slider.dispatchEvent(new Event("input")); }, score);
  await page.locator("#form textarea").first().focus();
  await run();
  seen.decisions.push([await text("#form output"), await text("#result .decision"), await page.locator("#result .bars tr").count()]);
}
await page.locator(".reliability summary").click();
seen.reliability = [await text(".reliability p"), await page.locator(".reliability polyline").count(), await wide()];

await page.locator("#tab-answer").click();
await page.locator("#examples button", { hasText: "windows" }).focus();
await page.keyboard.press("Enter");
await page.locator("button.run").focus();
await page.keyboard.press("Enter");
await page.waitForSelector("#answer:not([hidden])");
await page.waitForFunction(() => !document.querySelector("button.run").disabled);
seen.windows = {
  read: await text("#read h3"), drawn: await page.locator(".window").count(), rows: await page.locator("#read tbody tr").count(),
  marked: await text("#result mark"), inView: await page.locator("#result mark").evaluate((mark) => {
    const [inner, outer] = [mark, mark.closest(".text")].map((each) => each.getBoundingClientRect());
    return inner.top >= outer.top && inner.bottom <= outer.bottom;
  }),
  focus: await page.evaluate(() => document.activeElement.className), wide: await wide(),
};
await page.locator("[name=explain]").check();
await page.locator("#form textarea").first().fill("𝒜 bridge was built in Porto in 1886.");
await run();
seen.why = { title: await text("#reasons h3"), words: await page.locator("#reasons .word").allInnerTexts(), texts: await page.locator("#reasons h4").allInnerTexts() };

await page.locator("#tab-classify").click();
await page.locator("#form textarea").first().fill("<img src=x onerror=document.title='broken'> good");
await page.locator("#form textarea").first().focus();
await run();
seen.markup = [await text("#code"), await page.title()];
await page.locator("[name=explain]").check();
await page.locator("#form textarea").first().fill("a good and warm film ".repeat(16));
await run();
seen.explained = await stages();
await page.locator("#form textarea").first().fill("good ".repeat(2000));
await run();
seen.tooLong = await text("#reasons");
seen.cut = [await text("#notes"), await text("#read"), await page.locator("#read s").innerText()];
await page.locator("#form textarea").nth(0).fill("");
await page.locator("#form textarea").nth(1).fill("x".repeat(300000));
const place = () => page.locator("#form").evaluate((form) => form.getBoundingClientRect().top + scrollY);
const before = await place();
await run();
seen.moved = (await place()) - before;
seen.problem = await text("#problem");
await page.waitForTimeout(4500);
seen.load = await text("#load");
seen.wide = await wide();
// behind a balancer, which answers 404 for the metrics
await page.route("**/metrics", (route) => route.fulfill({ status: 404, body: "{}" }));
await page.waitForTimeout(2500);
seen.shown = await page.evaluate(() => ["metrics", "load-box"].filter((id) => !document.getElementById(id).hidden));
// every control has a name, and every button and field can be reached by keys
seen.nameless = await page.evaluate(() => [...document.querySelectorAll("button, input, select, textarea, summary, [role=tab]")]
  .filter((each) => !(each.labels?.length || each.textContent.trim() || each.getAttribute("aria-label"))).map((each) => each.outerHTML));
await browser.close();
console.log(JSON.stringify(seen));
