// Asks questions about one clip, or about what a camera sees, by the gateway's API. Draws their cost and which tokens
// pruning kept.

const STAGE_COLOURS = {
  fetch: "#7a6ff0", plan: "#4f8ff7", decode: "#26a69a", resize: "#66bb6a", wait_for_encoder: "#c0ca33",
  encode: "#ffb300", prune: "#fb8c00", transfer: "#f4511e", wait_for_prefill: "#d81b60", prefill: "#8e24aa",
};
const MAX_SLICES_DRAWN = 64;
const TOKEN_PX = 24; // the side of a token in a drawn frame
const FRAME_MS = 500;
const FRAME_PX = 640; // the width of a camera's frame
const MAX_WAITING_BYTES = 2 ** 20; // of frames that are not sent yet: beyond it the next ones are left out
const MAX_FRAMES_KEPT = 64; // of those that may still be drawn
const QUESTION_TOKENS = 256; // room for the text of a question about the camera
const CLIP_FIELD = /^messages\[0\]\.content\[\d\](\.(video|image)_url(\.url)?)?(?= )/; // how errors call the clip

const byId = (id) => document.getElementById(id);
const percent = (rate) => `${Math.round(rate * 100)} %`;
const ms = (seconds) => Math.round(seconds * 1000);

let clip = null; // {name, isVideo, url: a data URL}
let running = null; // AbortController of the question; of a live one, what cancels it
let live = null; // what the camera is watched with, see watch()
let automatic = null; // {name, suggested_threshold} of the method that has a threshold

// The clip

async function choose(file) {
  leave();
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
  clearErrors();
  if (live) {
    askLive();
    return;
  }
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

function clearErrors() {
  for (const id of ["file-error", "token-error", "question-error"]) byId(id).textContent = "";
}

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
  const article = newArticle();
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

function newArticle() {
  return byId("answer").content.cloneNode(true).firstElementChild;
}

function authorization() {
  return byId("token").value ? { authorization: `Bearer ${byId("token").value}` } : {};
}

function post(path, value, signal) {
  const headers = { "content-type": "application/json" };
  return fetched(path, { method: "POST", headers, body: JSON.stringify(value), signal });
}

async function fetched(path, { headers, ...options } = {}) {
  const answer = await fetch(path, { headers: { ...headers, ...authorization() }, ...options });
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
  list(article, {
    "Prompt tokens": full,
    "After pruning": usage.prompt_tokens,
    "From the cache": usage.prompt_tokens_details.cached_tokens,
    "First token": `${ms(firstS)} ms`,
    "All others": `${ms(generateS)} ms`,
  });
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

function list(article, values) {
  article.querySelector(".tokens").replaceChildren(...Object.entries(values).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
    return pair;
  }));
}

function element(name, properties) {
  return Object.assign(document.createElement(name), properties);
}

// What was kept

async function drawKept(article, request, signal) {
  const answer = await post("v1/framesieve/kept", request, signal);
  const { grid, kept, frame_times_s: times } = (await answer.json()).media[0];
  const { t, h, w } = grid;
  const isKept = new Uint8Array(t * h * w);
  for (const token of kept) isKept[token] = 1;
  const figure = article.querySelector(".kept");
  const shown = Math.min(t, MAX_SLICES_DRAWN);
  figure.querySelector("figcaption").textContent = `${kept.length} of ${t * h * w} visual tokens kept, the others `
    + `(${percent(1 - kept.length / (t * h * w))}) are dimmed.`
    + (shown < t ? ` The first ${shown} of ${t} slices are shown.` : "");
  figure.hidden = false;
  const video = await opened(clip.url);
  for (let slice = 0; slice < shown && !signal.aborted; slice += 1) {
    const ofSlice = isKept.subarray(slice * h * w, (slice + 1) * h * w);
    const timeS = times[slice * times.length / t];
    if (video) await seek(video, timeS);
    figure.querySelector(".frames").append(drawn(video, grid, ofSlice, timeS));
  }
}

// A canvas with a slice's frame, in which the tokens that were not kept are dimmed. picture: null for none.
function drawn(picture, { h, w }, isKept, timeS) {
  const canvas = element("canvas", { width: w * TOKEN_PX, height: h * TOKEN_PX, role: "img" });
  const count = isKept.reduce((sum, one) => sum + one, 0);
  canvas.ariaLabel = canvas.title = `Second ${timeS.toFixed(1)}: ${count} of ${h * w} tokens kept`;
  const context = canvas.getContext("2d");
  if (picture) context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  context.fillStyle = "rgb(20 22 26 / 80%)";
  isKept.forEach((one, token) => {
    if (!one) context.fillRect((token % w) * TOKEN_PX, Math.floor(token / w) * TOKEN_PX, TOKEN_PX, TOKEN_PX);
  });
  return canvas;
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

// The camera

byId("camera").addEventListener("click", () => (live ? leave() : watch()));

async function watch() {
  clearErrors();
  let stream;
  try {
    if (!navigator.mediaDevices) throw new Error("browsers give it to pages from https or localhost only.");
    stream = await navigator.mediaDevices.getUserMedia({ video: { width: FRAME_PX } });
  } catch (error) {
    byId("file-error").textContent = `The camera cannot be used: ${error.message}`;
    return;
  }
  let socket;
  try {
    socket = connected();
  } catch (error) { // of a token with characters that no subprotocol may have
    for (const track of stream.getTracks()) track.stop();
    showError(error);
    return;
  }
  running?.abort();
  leave();
  clip = null;
  const article = newArticle();
  // sent: the frames by their times. article: what was seen last. asked: the article of the question that is answered.
  live = { socket, stream, article, sent: new Map(), timer: 0, asked: null };
  socket.onmessage = ({ data }) => { if (live?.socket === socket) handle(JSON.parse(data)); };
  socket.onclose = ({ code }) => { if (live?.socket === socket) lost(code); };
  byId("picture").hidden = true;
  byId("player").hidden = byId("player").controls = false;
  byId("player").srcObject = stream;
  byId("player").play().catch(() => {}); // it was left before it began
  byId("camera").textContent = "Stop the camera";
  byId("file-name").textContent = "What does not change is dropped, whatever the rate.";
  article.classList.add("live");
  article.ariaLive = "off";
  article.querySelector("h2").textContent = "What the camera saw last";
  article.querySelector(".text").remove();
  byId("answers").replaceChildren(article);
  byId("note").textContent = "";
}

function connected() {
  const address = new URL("v1/realtime", location);
  address.protocol = address.protocol.replace("http", "ws");
  const token = byId("token").value;
  const key = token ? [`openai-insecure-api-key.${encodeURIComponent(token)}`] : [];
  return new WebSocket(address, ["realtime", ...key]);
}

function leave() {
  if (!live) return;
  const { socket, stream, timer, article } = live;
  finishLive();
  live = null;
  clearInterval(timer);
  socket.close();
  for (const track of stream.getTracks()) track.stop();
  article.ariaBusy = "false";
  byId("player").srcObject = null;
  byId("player").hidden = byId("player").controls = true;
  byId("camera").textContent = "Use the camera";
  byId("file-name").textContent = "";
}

// The server ended the connection, or refused it: browsers do not tell why.
async function lost(code) {
  leave();
  const isRefused = code === 1006 && !byId("question-error").textContent;
  try {
    if (isRefused) await fetched("v1/models");
    byId("question-error").textContent ||= "The server ended the live session.";
  } catch (error) {
    showError(error);
  }
}

function tell(event) {
  if (live?.socket.readyState === WebSocket.OPEN) live.socket.send(JSON.stringify(event));
}

function item(...content) {
  return { type: "conversation.item.create", item: { type: "message", role: "user", content } };
}

function sendFrame() {
  const player = byId("player");
  if (!player.videoWidth || live.socket.bufferedAmount > MAX_WAITING_BYTES) return;
  const canvas = element("canvas", { width: FRAME_PX, height: Math.round(FRAME_PX * player.videoHeight / player.videoWidth) });
  canvas.getContext("2d").drawImage(player, 0, 0, canvas.width, canvas.height);
  const timeS = performance.now() / 1000;
  live.sent.set(timeS, canvas);
  if (live.sent.size > MAX_FRAMES_KEPT) live.sent.delete(live.sent.keys().next().value);
  tell(item({ type: "input_image", image_url: canvas.toDataURL("image/jpeg", 0.8), time_s: timeS }));
}

function handle(event) {
  const { asked } = live;
  switch (event.type) {
    case "session.created": {
      const answer_tokens = QUESTION_TOKENS + Number(byId("longest").value);
      tell({ type: "session.update", event_id: "open", session: { type: "realtime", framesieve: { answer_tokens } } });
      break;
    }
    case "session.updated":
      live.timer = setInterval(sendFrame, FRAME_MS);
      break;
    case "framesieve.slice":
      drawSlice(event);
      break;
    case "response.output_text.delta":
      asked?.querySelector(".text").append(event.delta);
      break;
    case "response.done":
      if (asked) answered(asked, event.response);
      break;
    case "error":
      byId("question-error").textContent = event.error.message;
      if (event.error.event_id === "ask") finishLive();
      if (event.error.event_id === "open") leave();
  }
}

function drawSlice({ grid, kept, last_time_s: timeS, usage }) {
  const isKept = new Uint8Array(grid.h * grid.w);
  for (const token of kept) isKept[token] = 1;
  const figure = live.article.querySelector(".kept");
  const frame = live.sent.get(timeS) ?? null;
  for (const earlier of [...live.sent.keys()].filter((each) => each <= timeS)) live.sent.delete(earlier);
  figure.querySelector(".frames").replaceChildren(drawn(frame, grid, isKept, timeS));
  figure.querySelector("figcaption").textContent = `${kept.length} of ${isKept.length} visual tokens are new, the others are dimmed.`;
  figure.hidden = false;
  list(live.article, {
    "Frames": usage.used_frames,
    "Left out": usage.dropped_frames,
    "Tokens seen": usage.media_tokens_full,
    "Kept": usage.media_tokens,
    "Held now": usage.held_tokens,
  });
}

function askLive() {
  const article = newArticle();
  article.querySelector("h2").textContent = byId("question").value;
  live.article.after(article);
  live.asked = article;
  running = { abort: () => tell({ type: "response.cancel" }) };
  byId("send").disabled = true;
  byId("stop").hidden = false;
  tell(item({ type: "input_text", text: byId("question").value }));
  tell({ type: "response.create", event_id: "ask", response: { max_output_tokens: Number(byId("longest").value) } });
}

function answered(article, { status, usage }) {
  if (status === "incomplete") article.querySelector(".text").append(" […]");
  const { time_to_first_token_s: firstS, generate_s: generateS } = usage.framesieve;
  list(article, {
    "Prompt tokens": usage.input_tokens,
    "From the cache": usage.input_token_details.cached_tokens,
    "First token": `${ms(firstS)} ms`,
    "All others": `${ms(generateS)} ms`,
  });
  finishLive();
}

// The question is answered, or never will be.
function finishLive() {
  const { asked } = live;
  if (!asked) return;
  if (!asked.querySelector(".text").textContent) asked.remove();
  asked.ariaBusy = "false";
  live.asked = null;
  byId("send").disabled = false;
  byId("stop").hidden = true;
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
