// The last request as code for a shell, Python and JavaScript. The code runs unchanged; it never contains the key.

const json = (body) => JSON.stringify(body);

export function inCurl(url, body, hasKey) {
  const quoted = json(body).replaceAll("'", "'\\''");
  return `curl -s '${url}'${hasKey ? ' -H "authorization: Bearer $BERTSERVE_API_KEY"' : ""} \\\n  -H 'content-type: application/json' \\\n  -d '${quoted}'`;
}

export function inPython(url, body, hasKey) {
  const text = json(json(body)); // a JSON string with ASCII escapes is also a Python string
  return [
    ...(hasKey ? ["import os"] : []), "import json", "import urllib.request", "",
    `body = ${text}`,
    "request = urllib.request.Request(",
    `    ${json(url)},`,
    "    data=body.encode(),",
    `    headers={"content-type": "application/json"${hasKey ? ', "authorization": f"Bearer {os.environ[\'BERTSERVE_API_KEY\']}"' : ""}},`,
    ")", "print(json.load(urllib.request.urlopen(request)))",
  ].join("\n");
}

export function inJavaScript(url, body, hasKey) {
  return [
    `const response = await fetch(${json(url)}, {`,
    '  method: "POST",',
    `  headers: { "content-type": "application/json"${hasKey ? ", authorization: `Bearer ${process.env.BERTSERVE_API_KEY}`" : ""} },`,
    `  body: JSON.stringify(${json(body)}),`,
    "});", "console.log(await response.json());",
  ].join("\n");
}
