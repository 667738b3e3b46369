// Draws what an answer cost, and which tokens of the clip were kept.

import { element, list, ms, percent } from "./elements.js";

const STAGE_COLOURS = {
  fetch: "#7a6ff0", plan: "#4f8ff7", decode: "#26a69a", resize: "#66bb6a", wait_for_encoder: "#c0ca33",
  encode: "#ffb300", prune: "#fb8c00", transfer: "#f4511e", wait_for_prefill: "#d81b60", prefill: "#8e24aa",
};
const MAX_SLICES = 64;
const TOKEN_PX = 24; // the side of a token in a drawn frame

export function drawCost(article, usage) {
  const { prompt_tokens_full: full, time_to_first_token_s: firstS, generate_s: generateS, stages_s: stages, media } = usage.gridsieve;
  const heard = media.filter(({ modality }) => modality === "audio").map(({ heard_s: heardS }) => `${heardS.toFixed(1)} s`);
  list(article, {
    "Prompt tokens": full,
    "After pruning": usage.prompt_tokens,
    "From the cache": usage.prompt_tokens_details.cached_tokens,
    "First token": `${ms(firstS)} ms`,
    "All others": `${ms(generateS)} ms`,
    ...(heard.length && { "Sound heard": heard.join(", ") }),
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

// kept: a medium of /v1/gridsieve/kept. url: of the clip, which may end when the signal is aborted. attention: that of the
// answer, by which kept tokens are dimmed, too; or null.
export async function drawKept(article, { modality, grid, kept, frame_times_s: times }, url, attention, signal) {
  const { t, h, w } = grid;
  const light = new Float32Array(t * h * w); // of each token: 0 is dimmed, 1 is not
  const weights = attention?.media[0].weights;
  const most = weights?.reduce((one, other) => Math.max(one, other), 0);
  kept.forEach((token, place) => { light[token] = weights ? Math.max(0.01, Math.sqrt(weights[place] / most)) : 1; });
  const figure = article.querySelector(".kept");
  const shown = Math.min(t, MAX_SLICES);
  const clip = await (modality === "video" ? opened : loaded)(url, signal);
  if (signal.aborted) return;
  figure.querySelector("figcaption").textContent = `${kept.length} of ${t * h * w} visual tokens kept`
    + (kept.length < t * h * w ? `, the others (${percent(1 - kept.length / (t * h * w))}) are dimmed.` : ".")
    + (attention ? ` ${percent(weights.reduce((one, other) => one + other, 0))} of the answer's attention is on them: the more, the brighter.` : "")
    + (shown < t ? ` The first ${shown} of ${t} slices are shown.` : "")
    + (clip ? "" : " This browser cannot play the clip, so its pictures are missing.");
  figure.hidden = false;
  if (modality === "image" && !hasShapeOf(clip, grid)) return;
  for (let slice = 0; slice < shown; slice += 1) {
    const ofSlice = light.subarray(slice * h * w, (slice + 1) * h * w);
    const timeS = times.length ? times[slice * times.length / t] : null;
    if (clip && timeS !== null) {
      await seek(clip, timeS, signal);
      await paintable(clip, signal);
    }
    if (signal.aborted) return;
    const frame = element("div", {});
    frame.append(drawn(clip, grid, ofSlice, timeS));
    if (timeS !== null) frame.append(element("span", { className: "time", textContent: `${timeS.toFixed(1)} s` }));
    figure.querySelector(".frames").append(frame);
  }
}

// Whether the tokens of an image are places of it: not those of its tiles, and of a resampler.
function hasShapeOf(image, { t, h, w }) {
  return t === 1 && (!image || Math.abs(Math.log((w * image.naturalHeight) / (h * image.naturalWidth))) < 0.3);
}

// A canvas with a slice's frame, whose tokens are dimmed as far as their light is below 1; it is 0 of those that were not
// kept. picture: null for none. timeS: null of an image.
export function drawn(picture, { h, w }, light, timeS) {
  const canvas = element("canvas", { width: w * TOKEN_PX, height: h * TOKEN_PX, role: "img" });
  const count = light.reduce((sum, one) => sum + (one > 0), 0);
  canvas.ariaLabel = canvas.title = `${timeS === null ? "" : `Second ${timeS.toFixed(1)}: `}${count} of ${h * w} tokens kept`;
  const context = canvas.getContext("2d");
  if (picture) context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  light.forEach((one, token) => {
    if (one === 1) return;
    context.fillStyle = `rgb(20 22 26 / ${80 * (1 - one)}%)`;
    context.fillRect((token % w) * TOKEN_PX, Math.floor(token / w) * TOKEN_PX, TOKEN_PX, TOKEN_PX);
  });
  return canvas;
}

// An <img>, or null where this browser cannot show it.
function loaded(url, signal) {
  return new Promise((resolve) => {
    const image = element("img", {});
    image.onload = () => resolve(image);
    image.onerror = () => resolve(null);
    signal.addEventListener("abort", () => resolve(null));
    image.src = url;
  });
}

// A <video> with its first frame, or null where this browser cannot decode the clip.
function opened(url, signal) {
  return new Promise((resolve) => {
    const video = element("video", { muted: true, preload: "auto" });
    video.onloadeddata = () => resolve(video.videoWidth ? video : null);
    video.onerror = () => resolve(null);
    signal.addEventListener("abort", () => resolve(null));
    video.src = url;
  });
}

// On a busy machine Chromium tells the end of a seek before it has the frame: drawing it then leaves a canvas transparent.
// Ends after a second where the browser has no frame at all.
async function paintable(video, signal) {
  const context = element("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  for (let attempt = 0; attempt < 50 && !signal.aborted; attempt += 1) {
    context.drawImage(video, 0, 0, 1, 1);
    if (context.getImageData(0, 0, 1, 1).data[3]) return;
    await new Promise((resolve) => { setTimeout(resolve, 20); });
  }
}

// Also ends where the browser cannot decode on: the slice is then drawn with the last frame.
function seek(video, timeS, signal) {
  return new Promise((resolve) => {
    video.onseeked = video.onerror = resolve;
    signal.addEventListener("abort", resolve);
    video.currentTime = timeS + 0.001; // inside the frame that begins then
    if (video.error || signal.aborted) resolve(); // nothing of it is told any more
  });
}
