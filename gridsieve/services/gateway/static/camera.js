// Watches a camera by /v1/realtime, draws what was new in its frames, and asks about what it has seen. The browser's own
// camera is filmed here; the server opens a camera that has a URL.

import { drawn } from "./drawing.js";
import { byId, element, list, ms, newArticle, setBusy } from "./elements.js";
import { clearErrors, showError } from "./errors.js";
import { fetched } from "./server.js";

const FRAME_MS = 500;
const FRAME_PX = 640; // the width of a frame
const MAX_WAITING_BYTES = 2 ** 20; // of frames that are not sent yet: beyond it the next ones are left out
const MAX_FRAMES_KEPT = 64; // of those that may still be drawn
const QUESTION_TOKENS = 256; // room for the text of a question

const SOURCE = "session.gridsieve.source";
const STATES = { playing: "The camera plays.", lost: "The camera is lost, and is opened again:", ended: "The camera's video has ended." };

let live = null; // what a camera is watched with, see watch()

// button: of a kind of camera; none: of any.
export function isOn(button = live?.button) {
  return live !== null && live.button === button;
}

// begun: is called once the camera can be used.
export async function watch(button, begun) {
  clearErrors();
  const source = button.id === "watch" ? byId("source").value.trim() : null;
  if (source === "") {
    byId("file-error").textContent = "Give the URL of a camera first.";
    byId("source").focus();
    return;
  }
  const stream = source ? null : await filmed();
  if (!source && !stream) return;
  let socket;
  try {
    socket = connected();
  } catch (error) { // of a token with characters that no subprotocol may have
    stop(stream);
    showError(error);
    return;
  }
  leave();
  begun();
  const article = newArticle();
  // sent: the frames of the browser's camera by their times. article: what was seen last, at lastS. asked: the article
  // of the question that is answered.
  live = { button, label: button.textContent, source, socket, stream, article, sent: new Map(), timer: 0, asked: null, lastS: null };
  socket.onmessage = ({ data }) => { if (live?.socket === socket) handle(JSON.parse(data)); };
  socket.onclose = ({ code }) => { if (live?.socket === socket) lost(code); };
  byId("player").controls = false;
  byId("player").hidden = !stream;
  byId("player").srcObject = stream;
  byId("player").play().catch(() => {}); // it was left before it began
  button.textContent = "Stop the camera";
  byId("file-name").textContent = "What does not change is dropped, whatever the rate.";
  for (const group of document.querySelectorAll(".of-clip")) group.disabled = true;
  article.classList.add("live");
  article.ariaLive = "off";
  article.querySelector("h2").textContent = "What the camera saw last";
  article.querySelector(".text").remove();
  byId("answers").classList.remove("conversation");
  byId("answers").replaceChildren(article);
  byId("note").textContent = "";
}

// The browser's camera, or null with a word about that.
async function filmed() {
  try {
    if (!navigator.mediaDevices) throw new Error("browsers give it to pages from https or localhost only.");
    return await navigator.mediaDevices.getUserMedia({ video: { width: FRAME_PX } });
  } catch (error) {
    byId("file-error").textContent = `The camera cannot be used: ${error.message}`;
    return null;
  }
}

function stop(stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

function connected() {
  const address = new URL("v1/realtime", location);
  address.protocol = address.protocol.replace("http", "ws");
  const token = byId("token").value;
  const key = token ? [`openai-insecure-api-key.${encodeURIComponent(token)}`] : [];
  return new WebSocket(address, ["realtime", ...key]);
}

export function leave() {
  if (!live) return;
  const { button, label, socket, stream, timer, article } = live;
  finish();
  live = null;
  clearInterval(timer);
  socket.close();
  stop(stream);
  article.ariaBusy = "false";
  byId("player").srcObject = null;
  byId("player").hidden = byId("player").controls = true;
  button.textContent = label;
  for (const id of ["file-name", "preview-note"]) byId(id).textContent = "";
  for (const group of document.querySelectorAll(".of-clip")) group.disabled = false;
}

// The server ended the connection, or refused it: browsers do not tell why.
async function lost(code) {
  leave();
  if (byId("file-error").textContent || byId("question-error").textContent) return;
  try {
    if (code === 1006) await fetched("v1/models");
    byId("question-error").textContent = "The server ended the live session.";
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
      const ofSource = live.source ? { source: live.source, snapshots: "slices" } : {};
      tell({ type: "session.update", event_id: "open", session: { type: "realtime", gridsieve: { answer_tokens, ...ofSource } } });
      break;
    }
    case "session.updated":
      if (live.stream) live.timer = setInterval(sendFrame, FRAME_MS);
      else byId("preview-note").textContent = "The camera is being opened.";
      break;
    case "gridsieve.stream":
      byId("preview-note").textContent = `${STATES[event.state]} ${event.reason}`;
      break;
    case "gridsieve.slice":
      drawSlice(event);
      break;
    case "response.output_text.delta":
      asked?.querySelector(".text").append(event.delta);
      break;
    case "response.done":
      if (asked) answered(asked, event.response);
      break;
    case "error":
      byId(event.error.param === SOURCE ? "file-error" : "question-error").textContent = event.error.message.replace(SOURCE, "The camera");
      if (event.error.event_id === "ask") finish();
      if (event.error.event_id === "open") leave();
  }
}

async function drawSlice({ grid, kept, last_time_s: timeS, usage, snapshot, wall_time_s: wallS }) {
  const frame = snapshot ? element("img", { src: snapshot }) : live.sent.get(timeS) ?? null;
  for (const earlier of [...live.sent.keys()].filter((each) => each <= timeS)) live.sent.delete(earlier);
  live.lastS = timeS;
  await frame?.decode?.();
  if (live?.lastS !== timeS) return; // a newer one came
  const isKept = new Uint8Array(grid.h * grid.w);
  for (const token of kept) isKept[token] = 1;
  const figure = live.article.querySelector(".kept");
  figure.querySelector(".frames").replaceChildren(drawn(frame, grid, isKept, timeS));
  figure.querySelector("figcaption").textContent = `${kept.length} of ${isKept.length} visual tokens are new, the others are dimmed.`;
  figure.hidden = false;
  list(live.article, {
    "Frames": usage.used_frames,
    "Left out": usage.dropped_frames,
    "Tokens seen": usage.media_tokens_full,
    "Kept": usage.media_tokens,
    "Held now": usage.held_tokens,
    ...(wallS && { "Filmed at": new Date(wallS * 1000).toLocaleTimeString() }),
  });
}

export function ask() {
  if (live.asked) return;
  clearErrors();
  const article = newArticle();
  article.querySelector("h2").textContent = byId("question").value;
  live.article.after(article);
  live.asked = article;
  setBusy(true);
  tell(item({ type: "input_text", text: byId("question").value }));
  tell({ type: "response.create", event_id: "ask", response: { max_output_tokens: Number(byId("longest").value) } });
}

export function stopAnswer() {
  tell({ type: "response.cancel" });
}

function answered(article, { status, usage }) {
  if (status === "incomplete") article.querySelector(".text").append(" […]");
  const { time_to_first_token_s: firstS, generate_s: generateS } = usage.gridsieve;
  list(article, {
    "Prompt tokens": usage.input_tokens,
    "From the cache": usage.input_token_details.cached_tokens,
    "First token": `${ms(firstS)} ms`,
    "All others": `${ms(generateS)} ms`,
  });
  finish();
}

// The question is answered, or never will be.
function finish() {
  const { asked } = live;
  if (!asked) return;
  if (!asked.querySelector(".text").textContent) asked.remove();
  asked.ariaBusy = "false";
  live.asked = null;
  setBusy(false);
}
