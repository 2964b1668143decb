// A request written for a shell, for Python and for JavaScript: exactly what the page would send.
// Pure: knows requests and clients, not the page.

import { address } from "./api.js";

const MOST_ARGUMENT_BYTES = 100_000; // Linux takes 128 KiB
const INDENT = "    ";
const KEY_VARIABLE = "API_KEY"; // without STEPDIAL_: those are settings of the server
// What OpenAI's client takes by name; the rest goes in extra_body.
const OPENAI_FIELDS = ["model", "prompt", "max_tokens", "temperature", "seed", "stream"];

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** For a shell; -N lets streamed text through as it comes. */
function curl({ path, body }, hasKey) {
  const key = hasKey ? ` \\\n  -H "authorization: Bearer $${KEY_VARIABLE}"` : "";
  const json = JSON.stringify(body);
  const argument = quoted(json);
  const data = new Blob([argument]).size < MOST_ARGUMENT_BYTES ? argument : `@- <<'JSON'\n${json}\nJSON`;
  return `${body.stream ? "curl -N" : "curl"} ${quoted(address(path))} \\\n  -H 'content-type: application/json'${key} \\\n  -d ${data}`;
}

/** A value as Python writes it: strings of JSON are strings of Python. */
function literal(value, indent = "") {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map((item) => literal(item)).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = indent + INDENT;
  return `{\n${Object.entries(value).map(([key, item]) => `${inner}${JSON.stringify(key)}: ${literal(item, inner)},\n`).join("")}${indent}}`;
}

/** OpenAI's API takes fewer tokens than ours where nothing is said: here it is always said. */
function openai({ body, usualTokens }, hasKey) {
  const said = { max_tokens: usualTokens, ...body };
  const own = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.includes(name));
  const taken = OPENAI_FIELDS.filter((name) => name in said).map((name) => [name, said[name]]);
  const extra = own.map(([name, value]) => `"${name}": ${literal(value)}`).join(", ");
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address("v1")}", api_key=${hasKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"'})`,
    "stream = client.completions.create(",
    ...taken.map(([name, value]) => `${INDENT}${name}=${literal(value)},`),
    `${INDENT}extra_body={${extra}},`,
    ")",
    "for chunk in stream:",
    `${INDENT}print("".join(choice.text for choice in chunk.choices), end="", flush=True)`,
    'print("\\n", chunk.stepdial["budget"])',
  ].join("\n");
}

function httpx({ path, body: { stream: _, ...body }, writes }, hasKey) {
  return [
    ...(hasKey ? ["import os", ""] : []),
    "import httpx",
    "",
    "answer = httpx.post(",
    `${INDENT}"${address(path)}",`,
    ...(hasKey ? [`${INDENT}headers={"authorization": f"Bearer {os.environ['${KEY_VARIABLE}']}"},`] : []),
    `${INDENT}json=${literal(body, INDENT)},`,
    `${INDENT}timeout=60,`,
    ")",
    "answer.raise_for_status()",
    writes ? 'print(answer.json()["text"])' : 'print(answer.json()["results"][0])',
  ].join("\n");
}

// Beams are not in OpenAI's API.
const python = (request, hasKey) => (request.writes && !request.body.num_beams ? openai : httpx)(request, hasKey);

function javascript({ path, body, writes }, hasKey) {
  const key = hasKey ? `, authorization: \`Bearer \${process.env.${KEY_VARIABLE}}\`` : "";
  const lines = [
    `const response = await fetch("${address(path)}", {`,
    '  method: "POST",',
    `  headers: { "content-type": "application/json"${key} },`,
    `  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),`,
    "});",
    "if (!response.ok) throw new Error((await response.json()).error.message);",
  ];
  if (!writes) return [...lines, "console.log((await response.json()).results[0]);"].join("\n");
  return [
    ...lines,
    'let [text, pending] = ["", ""];',
    "for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {",
    '  const events = (pending + piece).split("\\n\\n");',
    "  pending = events.pop();",
    "  for (const event of events) {",
    '    const data = JSON.parse(event.slice(event.indexOf("data: ") + 6));',
    '    if (event.startsWith("event: error")) throw new Error(data.error.message);',
    '    if (event.startsWith("event: done")) console.log(text, data.budget);',
    "    else text += data.text;",
    "  }",
    "}",
  ].join("\n");
}

export const LANGUAGES = { curl, python, javascript };
