// The chosen clip, a video, an image or a sound: its preview, its limits, and how it gets to the server: uploaded once, or
// inside of each question where uploads are off, and if it is a sound.

import { byId, sizeOf } from "./elements.js";
import { clearErrors, showError } from "./errors.js";
import { upload, version } from "./server.js";
import { takesSounds } from "./service.js";

const PREVIEWS = { video: "player", image: "picture", audio: "sound" };

// {file, source: the path on this server that has the file, or null, kind: of PREVIEWS, url: for the browser,
//  sending: a promise of the uploaded file's id, stop: an AbortController while it is sent}
let clip = null;

// The chosen clip, or null with a word about that.
export function needed() {
  if (!clip) {
    byId("file-error").textContent = "Choose a clip first.";
    byId("file").focus();
  }
  return clip;
}

export async function choose(file, source = null) {
  forget();
  clearErrors();
  const [, kind] = /^(video|image|audio)\//.exec(file.type || "video/unknown") ?? []; // the bytes tell the server what it is
  if (!kind || (kind === "audio" && !takesSounds())) {
    byId("file-error").textContent = `${file.name} is no video${takesSounds() ? ", image or sound" : " or image"}.`;
    return;
  }
  const mine = clip = { file, source, kind, url: URL.createObjectURL(file), sending: null, stop: null };
  byId("file-name").textContent = `${file.name}, ${sizeOf(file.size)}`;
  const preview = byId(PREVIEWS[kind]);
  preview.src = clip.url;
  preview.hidden = false;
  try {
    const limits = await version();
    if (clip !== mine) return;
    const excess = excessOf(mine, limits);
    if (excess) forget();
    byId("file-error").textContent = excess;
    if (!excess && isUploaded(mine, limits)) await uploaded(mine);
  } catch (error) {
    showError(error, file.name);
  }
}

export function forget() {
  if (!clip) return;
  clip.stop?.abort();
  URL.revokeObjectURL(clip.url);
  clip = null;
  for (const id of Object.values(PREVIEWS)) byId(id).removeAttribute("src");
  for (const id of [...Object.values(PREVIEWS), "upload"]) byId(id).hidden = true;
  for (const id of ["file-name", "preview-note"]) byId(id).textContent = "";
}

// The clip as a part of a question.
export async function partOf(mine, signal) {
  const limits = await version();
  signal.throwIfAborted();
  if (isUploaded(mine, limits)) {
    signal.addEventListener("abort", () => mine.stop?.abort());
    return filePart(mine, await uploaded(mine));
  }
  return urlPart(mine, await dataUrl(mine.file));
}

export function filePart(mine, id) {
  return { type: "file", file: { file_id: id }, ...heard(mine) };
}

export function urlPart(mine, url) {
  const type = `${mine.kind}_url`;
  return { type, [type]: { url }, ...heard(mine) };
}

// The field of a part that lets the model hear the sound of a video.
function heard({ kind }) {
  return kind === "video" && byId("hear").checked ? { audio: true } : {};
}

// Whether the clip is uploaded. Questions name no uploaded sounds.
export function isUploaded({ kind }, { uploads }) {
  return uploads !== null && kind !== "audio";
}

// After the server deleted the file: the next question sends it again.
export function expired(mine) {
  mine.sending = null;
}

function excessOf(mine, limits) {
  const { file: { name, size }, kind } = mine;
  const limit = isUploaded(mine, limits) ? limits.uploads.file_bytes : limits.max_inline_bytes;
  if (size <= limit) return "";
  const setting = limits.uploads
    ? "the gateway with a larger --upload-max-bytes (gridsieve serve: --gateway-upload-max-bytes)"
    : "the gateway and preprocessing with --upload-root (gridsieve serve does)";
  const start = kind === "audio" ? "" : `, or start ${setting}`;
  return `${name} has ${sizeOf(size)}, and this server takes at most ${sizeOf(limit)} from the page. Cut the clip or `
    + `encode it smaller, ask about its URL by the API${start}.`;
}

function uploaded(mine) {
  mine.sending ??= send(mine).catch((error) => {
    mine.sending = null;
    throw error;
  });
  return mine.sending;
}

async function send(mine) {
  const [place, progress, text] = [byId("upload"), byId("upload-progress"), byId("upload-text")];
  mine.stop = new AbortController();
  progress.value = 0;
  text.textContent = "Sending the clip";
  place.hidden = false;
  try {
    return await upload(mine.file, mine.stop.signal, (sent, all) => {
      progress.value = sent / all;
      text.textContent = sent < all ? `${sizeOf(sent)} of ${sizeOf(all)} sent` : "Sent; the server stores the clip";
    });
  } finally {
    mine.stop = null;
    if (clip === mine) place.hidden = true;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function cannotShow() {
  const { kind, file } = clip;
  byId(PREVIEWS[kind]).hidden = true;
  byId("preview-note").textContent = `This browser cannot ${kind === "image" ? "show" : "play"} ${file.name}. The server may still answer.`;
}

for (const id of Object.values(PREVIEWS)) byId(id).addEventListener("error", () => { if (clip) cannotShow(); });
byId("player").addEventListener("loadedmetadata", () => { if (clip && !byId("player").videoWidth) cannotShow(); }); // sound alone
byId("stop-upload").addEventListener("click", () => clip.stop?.abort());
