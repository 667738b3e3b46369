// A question as text: for a shell with curl, and in Python by OpenAI's client. Both read the clip's file from the working
// directory, and the token from the variable GRIDSIEVE_TOKEN.

import { filePart, urlPart } from "./clip.js";
import { unique } from "./elements.js";
import { addressOf } from "./server.js";

// clip: {file, source: the path on this server that has the file, or null, …}. bodyOf: the question's, by the clip's part.
// uploads: whether the clip is uploaded, or sent inside of the question.
export function curl(clip, bodyOf, { uploads, hasToken }) {
  const place = unique();
  const body = quoted(JSON.stringify(bodyOf(partWith(place, clip, uploads)), null, 2));
  const token = hasToken ? ' -H "Authorization: Bearer $GRIDSIEVE_TOKEN"' : "";
  const ask = `curl -sS ${quoted(addressOf("v1/chat/completions"))}${token} -H 'Content-Type: application/json' -d`;
  const name = quoted(clip.file.name);
  const lines = clip.source ? [`curl -sS ${quoted(addressOf(clip.source))} -o ${name}`] : [];
  if (uploads) {
    const form = quoted(`file=@"${clip.file.name.replace(/["\\]/g, "\\$&")}"`);
    const upload = `curl -sS ${quoted(addressOf("v1/files"))}${token} -F ${form}`;
    lines.push(
      `told=$(${upload})`,
      `id=$(printf %s "$told" | grep -oE 'file-[0-9a-f]{64}' | head -n 1)`,
      `if [ "$id" ]; then ${ask} ${body.replace(place, "'\"$id\"'")}`,
      "else printf '%s\\n' \"$told\" >&2; false; fi",
    );
  } else {
    const [before, after] = body.split(place);
    lines.push(`{ printf %s ${before}'; base64 < ${name} | tr -d '\\n'; printf %s '${after}; } | ${ask} @-`); // too long for an argument
  }
  return `${lines.join("\n")}\n`;
}

export function python(clip, bodyOf, { uploads, hasToken }) {
  const place = unique();
  const { messages, max_completion_tokens: longest, ...others } = bodyOf(partWith(place, clip, uploads));
  const value = uploads ? [`"${place}"`, "clip.id"] : [`${place}"`, '" + base64.b64encode(clip).decode()'];
  const name = JSON.stringify(clip.file.name);
  const token = hasToken ? 'os.environ["GRIDSIEVE_TOKEN"]' : '"unused"';
  return `${[
    ...(uploads ? [] : ["import base64"]),
    ...(hasToken ? ["import os"] : []),
    "from pathlib import Path",
    ...(clip.source ? ["from urllib.request import urlretrieve"] : []),
    "",
    "from openai import OpenAI  # pip install openai",
    "",
    ...(clip.source ? [`urlretrieve(${JSON.stringify(addressOf(clip.source))}, ${name})`] : []),
    `client = OpenAI(base_url=${JSON.stringify(addressOf("v1"))}, api_key=${token})`,
    uploads ? `clip = client.files.create(file=Path(${name}), purpose="user_data")` : `clip = Path(${name}).read_bytes()`,
    "answer = client.chat.completions.create(",
    "    model=client.models.list().data[0].id,",
    `    messages=${indented(messages).replace(...value)},`,
    `    max_completion_tokens=${longest},`,
    `    extra_body=${indented(others)},`,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n")}\n`;
}

// The clip's part, in which `place` stands for what the text fills in: the file's id, or its bytes in base64.
function partWith(place, clip, uploads) {
  return uploads ? filePart(clip, place) : urlPart(clip, `data:${clip.file.type};base64,${place}`);
}

// JSON in which true is Python's; a question has neither false nor null.
function indented(value) {
  const yes = unique();
  const text = JSON.stringify(value, (_, each) => (each === true ? yes : each), 4);
  return text.replaceAll(`"${yes}"`, "True").replaceAll("\n", "\n    ");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
