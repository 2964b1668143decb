// The HTTP interface of this server: models, ladder, classify, generate. Knows nothing of the page,
// but that a key may have to be asked for.

import * as key from "./key.js";

const TITLES = {
  400: "The server could not read the request",
  401: "The server wants an API key",
  403: "The server does not allow this",
  404: "The server does not have this model",
  408: "The request took too long to arrive",
  413: "The input is too large for this server",
  422: "This request cannot be met",
  429: "The server is full",
  503: "The server is not ready",
  504: "The deadline passed before the answer was complete",
};

/** A failed request in plain words: title, message, and code for whoever reads the logs. */
export class RequestFailure extends Error {
  constructor(title, message, code = "", status = 0) {
    super(message);
    this.name = "RequestFailure";
    this.title = title;
    this.code = code;
    this.status = status;
  }
}

/** Without what the address of the page may hold before its host: a key, as in http://any:KEY@host/. */
export const address = (path) => new URL(path, location.origin + location.pathname).href;

function retryHint(headers) {
  const waitMs = Number(headers.get("retry-after-ms")) || 1000 * Number(headers.get("retry-after"));
  return waitMs > 0 ? ` It asks to try again in ${(Math.ceil(waitMs / 100) / 10).toFixed(1)} s.` : "";
}

async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // The body is not JSON: a proxy answered in place of the server, so the status has to do.
  }
  const title = TITLES[response.status] ?? (response.status >= 500 ? "The server failed" : "The request was refused");
  const message = (error.message ?? `The answer was HTTP ${response.status} without an explanation.`) + retryHint(response.headers);
  const code = [`HTTP ${response.status}`, error.code, error.param && `field ${error.param}`].filter(Boolean).join(" · ");
  return new RequestFailure(title, message, code, response.status);
}

async function answered(path, { headers, ...init } = {}) {
  const carried = key.credentials();
  try {
    const response = await fetch(address(path), { ...init, credentials: carried.credentials, headers: { ...headers, ...carried.headers } });
    key.heed(response.headers);
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailure("The server does not answer", "Is it still running? Start it again with stepdial serve, then retry.", "no connection");
  }
}

async function call(path, init, asks = true) {
  for (;;) {
    const sentKey = key.current();
    const response = await answered(path, init);
    if (response.ok) return response;
    const failure = await failureOf(response);
    const again = response.status === 401 && asks && (await key.ask(failure.message, sentKey));
    init?.signal?.throwIfAborted();
    if (!again) throw failure;
  }
}

/** What an answer holds; it may break off, or come from what stands in place of the server. */
async function content(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailure("The answer cannot be read", "It broke off, or it is not from Stepdial: does something stand before the server?", `HTTP ${response.status}`, response.status);
  }
}

const post = (path, body, signal) =>
  call(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });

export const models = async () => (await content(await call("v1/models"))).data ?? [];

/** Without `asks` nobody is asked for a key: a dialog that opens by itself would interrupt the reader. */
export const ladder = async (name, asks) => content(await call(`v1/models/${encodeURIComponent(name)}/ladder`, {}, asks));

export const classify = async (body, signal) => content(await post("v1/classify", body, signal));

/** A text that is sent whole. */
export const write = async (body, signal) => content(await post("v1/generate", body, signal));

/** The events of a generation: {event, data} until one terminal `done` or `error`. */
export async function* generate(body, signal) {
  const response = await post("v1/generate", body, signal);
  for await (const item of events(response.body)) {
    yield item;
    if (item.event === "done" || item.event === "error") return;
  }
  throw new RequestFailure("The stream broke off", "The connection closed before the text was complete.", "no terminal event");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // A carriage return at the very end may be half of a line break: keep it for the next piece.
      pending = (pending + value).replace(/\r\n/g, "\n");
      let end;
      while ((end = pending.indexOf("\n\n")) >= 0) {
        const item = parseEvent(pending.slice(0, end));
        pending = pending.slice(end + 2);
        if (item) yield item;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailure("The stream broke off", "The connection closed before the text was complete.", "connection lost");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}
