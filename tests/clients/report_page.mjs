// Opens a report of bert-bench in Chromium at a width, and prints what lies outside it as JSON: node report_page.mjs URL CHROMIUM WIDTH
import { chromium } from "playwright-core";

const [url, executablePath, width] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
const page = await browser.newPage({ viewport: { width: Number(width), height: 800 } });
await page.goto(url);
const seen = await page.evaluate(() => {
  for (const box of document.querySelectorAll("details")) box.open = true;
  return {
    width: document.documentElement.scrollWidth,
    outside: [...document.querySelectorAll("body *:not(svg *)")].filter((each) => each.getBoundingClientRect().right > innerWidth).map((each) => each.outerHTML.slice(0, 200)),
    plots: document.querySelectorAll("figure svg").length,
    // a label of the y-axis is rotated
    smallest_text_px: Math.min(...[...document.querySelectorAll("figure svg text")].map((each) => {
      const { a, b } = each.getScreenCTM();
      return parseFloat(getComputedStyle(each).fontSize) * Math.hypot(a, b);
    })),
  };
});
await browser.close();
console.log(JSON.stringify(seen));
