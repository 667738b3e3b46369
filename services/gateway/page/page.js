// The page: asks about one clip by the gateway's own API, and draws what pruning kept. It needs nothing else.

const at = (id) => document.getElementById(id);
const STAGES = {
  fetch: "#7a6ff0", plan: "#4f8ff7", decode: "#26a69a", resize: "#66bb6a", wait_for_encoder: "#c0ca33",
  encode: "#ffb300", prune: "#fb8c00", transfer: "#f4511e", wait_for_prefill: "#d81b60", prefill: "#8e24aa",
};
const MAX_FRAMES_DRAWN = 64;

let clip = null; // {name, type, url: data URL}
let running = null; // AbortController

// --- the clip ---------------------------------------------------------------------------------------------------

async function take(file) {
  at("file-error").textContent = "";
  if (!/^(video|image)\//.test(file.type)) {
    at("file-error").textContent = `${file.name} is neither a video nor an image.`;
    return;
  }
  clip = { name: file.name, type: file.type, url: await dataUrl(file) };
  at("file-name").textContent = `${file.name}, ${(file.size / 2 ** 20).toFixed(2)} MiB`;
  at("drop-hint").hidden = true;
  const video = at("clip");
  video.hidden = !file.type.startsWith("video/");
  video.src = video.hidden ? "" : URL.createObjectURL(file);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

at("file").addEventListener("change", (event) => event.target.files[0] && take(event.target.files[0]));
at("drop").addEventListener("dragover", (event) => { event.preventDefault(); at("drop").classList.add("over"); });
at("drop").addEventListener("dragleave", () => at("drop").classList.remove("over"));
at("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  at("drop").classList.remove("over");
  if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
});
at("demo").addEventListener("click", async () => {
  const answer = await fetch("page/demo.mp4");
  take(new File([await answer.blob()], "demo.mp4", { type: "video/mp4" }));
  at("question").value ||= "What moves?";
});

// --- the question -----------------------------------------------------------------------------------------------

at("rate").addEventListener("input", () => { at("rate-shown").textContent = `${Math.round(at("rate").value * 100)} %`; });
at("stop").addEventListener("click", () => running?.abort());
at("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  at("ask-error").textContent = at("file-error").textContent = "";
  if (!clip) {
    at("file-error").textContent = "Choose a clip first.";
    return;
  }
  const rate = Number(at("rate").value);
  const rates = at("compare").checked && rate > 0 ? [0, rate] : [rate];
  at("answers").replaceChildren();
  running = new AbortController();
  at("send").disabled = true;
  at("stop").hidden = false;
  try {
    for (const each of rates) await ask(each, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") tell(error);
  } finally {
    at("send").disabled = false;
    at("stop").hidden = true;
  }
});

// An error is said where it belongs: at the file, at the token, or at the question.
function tell(error) {
  if (error.status === 401) {
    at("access").open = true;
    at("token").focus();
  }
  const place = /^messages\[0\]\.content\[0\]/.test(error.message) ? "file-error" : "ask-error";
  at(place).textContent = error.message.replace(/^messages\[0\]\.content\[0\](\.\w+)*/, clip.name);
}

function body(rate) {
  const kind = clip.type.startsWith("image/") ? "image_url" : "video_url";
  return {
    messages: [{ role: "user", content: [{ type: kind, [kind]: { url: clip.url } }, { type: "text", text: at("question").value }] }],
    pruning: { rate, method: at("method").value },
  };
}

async function post(path, value, signal) {
  const headers = { "content-type": "application/json" };
  if (at("token").value) headers.authorization = `Bearer ${at("token").value}`;
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(value), signal });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw Object.assign(new Error(told?.error?.message ?? `The server answered ${answer.status}.`), { status: answer.status });
}

async function ask(rate, signal) {
  const article = at("answer").content.cloneNode(true).firstElementChild;
  at("answers").append(article);
  article.querySelector("h2").textContent = rate ? `Pruned by ${Math.round(rate * 100)} %` : "Not pruned";
  try {
    const answer = await post("v1/chat/completions", { ...body(rate), stream: true, stream_options: { include_usage: true } }, signal);
    for await (const chunk of events(answer)) {
      if (chunk.error) throw new Error(chunk.error.message);
      article.querySelector(".text").append(chunk.choices[0]?.delta?.content ?? "");
      if (chunk.usage) drawUsage(article, chunk.usage);
    }
  } catch (error) {
    if (!article.querySelector(".text").textContent) article.remove();
    else article.querySelector(".error").textContent = error.message;
    throw error;
  }
  await drawKept(article, rate, signal);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

// --- what it cost -----------------------------------------------------------------------------------------------

function drawUsage(article, usage) {
  const { prompt_tokens_full: full, time_to_first_token_s: firstS, stages_s: stages, generate_s: generateS } = usage.framesieve;
  const shown = {
    "prompt tokens before": full,
    "after pruning": usage.prompt_tokens,
    "from the cache": usage.prompt_tokens_details.cached_tokens,
    "first token": `${(firstS * 1000).toFixed(0)} ms`,
    "the rest": `${(generateS * 1000).toFixed(0)} ms`,
  };
  article.querySelector(".tokens").replaceChildren(...Object.entries(shown).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }));
    return pair;
  }));
  const bar = article.querySelector(".bar");
  const told = Object.entries(stages).filter(([, seconds]) => seconds >= 0.0005);
  bar.replaceChildren(...told.map(([name, seconds]) => {
    const part = Object.assign(document.createElement("span"), { title: `${name}: ${(seconds * 1000).toFixed(1)} ms` });
    part.style.flexGrow = seconds;
    part.style.background = STAGES[name];
    return part;
  }));
  const words = told.map(([name, seconds]) => `${name.replaceAll("_", " ")} ${(seconds * 1000).toFixed(0)}`).join(", ");
  bar.setAttribute("aria-label", `Time to the first token, in milliseconds: ${words}`);
  article.querySelector(".stages figcaption").textContent = `Time to the first token, ms: ${words}`;
  article.querySelector(".stages").hidden = false;
}

// --- what was kept ----------------------------------------------------------------------------------------------

async function drawKept(article, rate, signal) {
  if (!clip.type.startsWith("video/")) return;
  const figure = article.querySelector(".kept");
  let item;
  try {
    [item] = (await (await post("v1/framesieve/kept", { ...body(rate), messages: [{ role: "user", content: [body(rate).messages[0].content[0]] }] }, signal)).json()).media;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    figure.hidden = false;
    figure.querySelector("figcaption").textContent = error.message;
    return;
  }
  const { t, h, w } = item.grid;
  const kept = new Set(item.kept);
  const perSlice = item.frame_times_s.length / t;
  const video = document.createElement("video");
  video.muted = true;
  video.src = clip.url;
  await new Promise((resolve) => { video.onloadeddata = video.onerror = resolve; });
  const slices = Math.min(t, MAX_FRAMES_DRAWN);
  for (let slice = 0; slice < slices; slice += 1) {
    const canvas = Object.assign(document.createElement("canvas"), { width: w * 24, height: h * 24 });
    const draw = canvas.getContext("2d");
    if (!video.error) {
      video.currentTime = item.frame_times_s[slice * perSlice] + 1e-3;
      await new Promise((resolve) => { video.onseeked = resolve; });
      draw.drawImage(video, 0, 0, canvas.width, canvas.height);
    }
    draw.fillStyle = "rgb(20 22 26 / 78%)";
    for (let cell = 0; cell < h * w; cell += 1) {
      if (!kept.has(slice * h * w + cell)) draw.fillRect((cell % w) * 24, Math.floor(cell / w) * 24, 24, 24);
    }
    figure.querySelector(".frames").append(canvas);
  }
  figure.hidden = false;
  const more = t > slices ? `, the first ${slices} of ${t} pairs of frames` : "";
  figure.querySelector("figcaption").textContent = `${item.kept.length} of ${t * h * w} patches kept; the others are dimmed${more}.`;
}

// --- at the start -----------------------------------------------------------------------------------------------

fetch("v1/models").then((answer) => answer.json()).then((told) => {
  at("model").textContent = told.data ? `model: ${told.data[0].id}` : "";
  if (told.error) { at("access").open = true; }
}).catch(() => { at("ask-error").textContent = "The server cannot be reached."; });
fetch("page/demo.mp4", { method: "HEAD" }).then((answer) => { at("demo").hidden = !answer.ok; }).catch(() => {});
