// Requests to the gateway that the page came from. A refusal is an Error with `status`; one that was stopped has the
// name AbortError.

import { byId } from "./elements.js";

let limits = null;

// A URL of this server for other programs.
export function addressOf(path) {
  return new URL(path, document.baseURI).href;
}

// {max_inline_bytes, uploads: {file_bytes, …} or null}
export async function version() {
  limits ??= await (await fetched("version")).json();
  return limits;
}

export function post(path, value, signal) {
  const headers = { "content-type": "application/json" };
  return fetched(path, { method: "POST", headers, body: JSON.stringify(value), signal });
}

export async function fetched(path, { headers, ...options } = {}) {
  const request = new Request(path, { headers: { ...headers, ...authorization() }, ...options });
  const answer = await fetch(request).catch((error) => { throw error instanceof TypeError ? unreachable() : error; });
  if (answer.ok) return answer;
  throw refusal(answer.status, await answer.json().catch(() => null));
}

// The JSON values of server-sent events.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw error instanceof TypeError ? unreachable() : error; });
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice("data: ".length));
    }
  }
}

// Resolves to the id of the uploaded file. sent: is told how many of the bytes were sent, and of how many.
export function upload(file, signal, sent) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // fetch tells nothing of what was sent
    request.open("POST", "v1/files");
    for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
    request.responseType = "json";
    request.upload.onprogress = ({ loaded, total }) => sent(loaded, total);
    request.onload = () => (request.status === 200 ? resolve(request.response.id) : reject(refusal(request.status, request.response)));
    request.onerror = () => reject(unreachable());
    request.onabort = () => reject(signal.reason);
    signal.addEventListener("abort", () => request.abort());
    const form = new FormData();
    form.append("purpose", "user_data");
    form.append("file", file);
    request.send(form);
  });
}

function authorization() {
  return byId("token").value ? { authorization: `Bearer ${byId("token").value}` } : {};
}

function refusal(status, told) {
  return Object.assign(new Error(told?.error?.message ?? `The server answered ${status}.`), { status });
}

function unreachable() {
  return new Error(`The server at ${location.origin} cannot be reached. Check that it still runs (gridsieve serve) and `
    + "that this device reaches it, then ask again.");
}
