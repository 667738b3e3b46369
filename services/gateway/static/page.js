// Asks a question about one clip by the gateway's API, and draws its cost and which tokens pruning kept.

const STAGE_COLOURS = {
  fetch: "#7a6ff0", plan: "#4f8ff7", decode: "#26a69a", resize: "#66bb6a", wait_for_encoder: "#c0ca33",
  encode: "#ffb300", prune: "#fb8c00", transfer: "#f4511e", wait_for_prefill: "#d81b60", prefill: "#8e24aa",
};
const MAX_SLICES_DRAWN = 64;
const TOKEN_PX = 24; // the side of a token in a drawn frame
const CLIP_FIELD = /^messages\[0\]\.content\[\d\](\.(video|image)_url(\.url)?)?(?= )/; // how errors call the clip

const byId = (id) => document.getElementById(id);
const percent = (rate) => `${Math.round(rate * 100)} %`;
const ms = (seconds) => Math.round(seconds * 1000);

let clip = null; // {name, isVideo, url: a data URL}
let running = null; // AbortController of the question
let automatic = null; // {name, suggested_threshold} of the method that has a threshold

// The clip

async function choose(file) {
  const [, kind] = /^(video|image)\//.exec(file.type) ?? [];
  clip = null;
  byId("file-error").textContent = kind ? "" : `${file.name} is neither a video nor an image.`;
  byId("file-name").textContent = kind ? `${file.name}, ${(file.size / 2 ** 20).toFixed(2)} MiB` : "";
  for (const [id, its] of [["player", "video"], ["picture", "image"]]) {
    byId(id).hidden = kind !== its;
    if (kind === its) byId(id).src = URL.createObjectURL(file);
  }
  if (kind) clip = { name: file.name, isVideo: kind === "video", url: await dataUrl(file) };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

byId("file").addEventListener("change", (event) => { if (event.target.files[0]) choose(event.target.files[0]); });
byId("demo").addEventListener("click", async () => {
  const answer = await fetch("page/demo.mp4");
  await choose(new File([await answer.blob()], "demo.mp4", { type: "video/mp4" }));
  byId("question").value ||= "What moves?";
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
document.addEventListener("dragleave", () => byId("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").classList.remove("over");
  if (event.dataTransfer.files[0]) choose(event.dataTransfer.files[0]);
});

// The question

for (const slider of [byId("rate"), byId("other-rate")]) {
  const show = () => {
    document.querySelector(`output[for=${slider.id}]`).textContent = percent(slider.value);
    slider.setAttribute("aria-valuetext", percent(slider.value));
  };
  slider.addEventListener("input", show);
  show();
}
byId("compare").addEventListener("change", () => { byId("other").hidden = !byId("compare").checked; });
byId("automatic").addEventListener("change", () => {
  for (const id of ["rate", "method"]) byId(id).disabled = byId("automatic").checked;
});
byId("stop").addEventListener("click", () => running.abort());
byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  for (const id of ["file-error", "token-error", "question-error"]) byId(id).textContent = "";
  if (!clip) {
    byId("file-error").textContent = "Choose a clip first.";
    byId("file").focus();
    return;
  }
  const method = byId("method").value;
  const prunings = [byId("automatic").checked
    ? { rate: 0, method: automatic.name, threshold: automatic.suggested_threshold }
    : { rate: Number(byId("rate").value), method }];
  if (byId("compare").checked) prunings.unshift({ rate: Number(byId("other-rate").value), method });
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").hidden = false;
  byId("answers").replaceChildren();
  byId("note").textContent = "";
  try {
    if (prunings.length > 1) await encode(prunings, running.signal);
    for (const pruning of prunings) await ask(pruning, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    byId("send").disabled = false;
    byId("stop").hidden = true;
  }
});

function showError(error) {
  if (error.status === 401) {
    byId("access").open = true;
    byId("token-error").textContent = error.message;
    byId("token").focus();
  } else if (CLIP_FIELD.test(error.message)) {
    byId("file-error").textContent = error.message.replace(CLIP_FIELD, clip.name);
  } else {
    byId("question-error").textContent = error.message;
  }
}

// Puts the clip into the encoder's cache, so that the first of two answers does not pay for both. The question comes
// before the clip, so that neither answer finds this prompt in the cache of generation.
async function encode([, pruning], signal) {
  if (byId("before-tower").querySelector(`[value=${pruning.method}]`)) {
    byId("note").textContent = "Each answer decodes and encodes the clip for itself: the tower computes only the tokens that are kept.";
    return;
  }
  byId("note").textContent = "The clip is decoded and encoded before both answers, which costs the same at every rate.";
  const { messages: [{ content: [media, question] }], ...request } = requestWith(pruning);
  const turned = { role: "user", content: [question, media] };
  await post("v1/chat/completions", { ...request, messages: [turned], max_completion_tokens: 1 }, signal);
}

function requestWith(pruning) {
  const media = { type: clip.isVideo ? "video_url" : "image_url" };
  media[media.type] = { url: clip.url };
  const content = [media, { type: "text", text: byId("question").value }];
  return {
    messages: [{ role: "user", content }],
    pruning,
    max_completion_tokens: Number(byId("longest").value),
  };
}

async function ask(pruning, signal) {
  const article = byId("answer").content.cloneNode(true).firstElementChild;
  const isAutomatic = pruning.threshold !== undefined;
  const heading = article.querySelector("h2");
  heading.textContent = isAutomatic ? "Pruned automatically" : pruning.rate ? `Pruned by ${percent(pruning.rate)}` : "Not pruned";
  byId("answers").append(article);
  const text = article.querySelector(".text");
  const request = requestWith(pruning);
  try {
    const answer = await post("v1/chat/completions", { ...request, stream: true, stream_options: { include_usage: true } }, signal);
    for await (const chunk of events(answer)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      text.append(choice?.delta.content ?? "");
      if (choice?.finish_reason === "length") text.append(" […]");
      if (!chunk.usage) continue;
      drawCost(article, chunk.usage);
      const [came] = chunk.usage.framesieve.media;
      if (isAutomatic) heading.textContent += `, by ${percent(came.pruning_rate)}`;
    }
    if (clip.isVideo) await drawKept(article, request, signal);
  } catch (error) {
    if (!text.textContent) article.remove();
    else if (error.name !== "AbortError") article.querySelector(".error").textContent = error.message;
    if (!text.textContent || error.name === "AbortError") throw error;
  } finally {
    article.setAttribute("aria-busy", "false");
  }
}

function authorization() {
  return byId("token").value ? { authorization: `Bearer ${byId("token").value}` } : {};
}

async function post(path, value, signal) {
  const headers = { "content-type": "application/json", ...authorization() };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(value), signal });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw Object.assign(new Error(told?.error?.message ?? `The server answered ${answer.status}.`), { status: answer.status });
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
      if (line.startsWith("data: {")) yield JSON.parse(line.slice("data: ".length));
    }
  }
}

// The cost

function drawCost(article, usage) {
  const { prompt_tokens_full: full, time_to_first_token_s: firstS, generate_s: generateS, stages_s: stages } = usage.framesieve;
  const cost = {
    "Prompt tokens": full,
    "After pruning": usage.prompt_tokens,
    "From the cache": usage.prompt_tokens_details.cached_tokens,
    "First token": `${ms(firstS)} ms`,
    "All others": `${ms(generateS)} ms`,
  };
  article.querySelector(".tokens").replaceChildren(...Object.entries(cost).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
    return pair;
  }));
  const used = Object.entries(stages).filter(([, seconds]) => seconds > 0);
  article.querySelector(".bar").replaceChildren(...used.map(([stage, seconds]) => {
    const part = element("span", { title: `${stage.replaceAll("_", " ")}: ${(seconds * 1000).toFixed(1)} ms` });
    part.style.flexGrow = seconds * 1000; // a sum below 1 would not fill the bar
    part.style.background = STAGE_COLOURS[stage];
    return part;
  }));
  article.querySelector(".bar").setAttribute("aria-label", "Stages of the time to the first token");
  article.querySelector(".stages figcaption").replaceChildren("Time to the first token, in ms: ", ...used.filter(([, seconds]) => ms(seconds)).map(([stage, seconds]) => {
    const key = element("span", { className: "key", textContent: `${stage.replaceAll("_", " ")} ${ms(seconds)}` });
    key.style.borderColor = STAGE_COLOURS[stage];
    return key;
  }));
  article.querySelector(".stages").hidden = false;
}

function element(name, properties) {
  return Object.assign(document.createElement(name), properties);
}

// What was kept

async function drawKept(article, request, signal) {
  const answer = await post("v1/framesieve/kept", request, signal);
  const { grid: { t, h, w }, kept, frame_times_s: times } = (await answer.json()).media[0];
  const isKept = new Uint8Array(t * h * w);
  for (const token of kept) isKept[token] = 1;
  const figure = article.querySelector(".kept");
  const drawn = Math.min(t, MAX_SLICES_DRAWN);
  figure.querySelector("figcaption").textContent = `${kept.length} of ${t * h * w} visual tokens kept, the others `
    + `(${percent(1 - kept.length / (t * h * w))}) are dimmed.`
    + (drawn < t ? ` The first ${drawn} of ${t} slices are shown.` : "");
  figure.hidden = false;
  const video = await opened(clip.url);
  for (let slice = 0; slice < drawn && !signal.aborted; slice += 1) {
    const ofSlice = isKept.subarray(slice * h * w, (slice + 1) * h * w);
    const timeS = times[slice * times.length / t];
    const canvas = element("canvas", { width: w * TOKEN_PX, height: h * TOKEN_PX, role: "img" });
    const count = ofSlice.reduce((sum, one) => sum + one, 0);
    canvas.ariaLabel = canvas.title = `Second ${timeS.toFixed(1)}: ${count} of ${h * w} tokens kept`;
    const context = canvas.getContext("2d");
    if (video) {
      await seek(video, timeS);
      context.drawImage(video, 0, 0, canvas.width, canvas.height);
    }
    context.fillStyle = "rgb(20 22 26 / 80%)";
    ofSlice.forEach((one, token) => {
      if (!one) context.fillRect((token % w) * TOKEN_PX, Math.floor(token / w) * TOKEN_PX, TOKEN_PX, TOKEN_PX);
    });
    figure.querySelector(".frames").append(canvas);
  }
}

// A <video> with its first frame, or null where this browser cannot decode the clip.
function opened(url) {
  return new Promise((resolve) => {
    const video = element("video", { muted: true, preload: "auto" });
    video.onloadeddata = () => resolve(video);
    video.onerror = () => resolve(null);
    video.src = url;
  });
}

function seek(video, timeS) {
  return new Promise((resolve) => {
    video.onseeked = resolve;
    video.currentTime = timeS + 0.001; // inside the frame that begins then
  });
}

// At the start

fetch("page/demo.mp4", { method: "HEAD" }).then((answer) => { byId("demo").hidden = !answer.ok; });
askModels();
byId("token").addEventListener("change", askModels);

function askModels() {
  fetch("v1/models", { headers: authorization() }).then((answer) => answer.json()).then((told) => {
    if (told.error) byId("access").open = true;
    if (!told.data) return;
    const [{ id, pruning_methods: methods }] = told.data;
    byId("model").textContent = `Model: ${id}`;
    const offered = [...byId("method").options];
    for (const option of offered) option.disabled = !methods.some(({ name }) => name === option.value);
    if (byId("method").selectedOptions[0].disabled) byId("method").value = offered.find((option) => !option.disabled)?.value;
    automatic = methods.find((method) => method.suggested_threshold !== null) ?? null;
    byId("automatic").parentElement.hidden = !automatic;
  }).catch(() => { byId("question-error").textContent = "The server cannot be reached."; });
}
