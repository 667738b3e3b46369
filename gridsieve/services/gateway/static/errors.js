// Errors, each beside what it is about: the clip, the token or the question.

import { byId } from "./elements.js";

const CLIP_FIELD = /^messages\[0\]\.content\[\d\](\.(video|image|audio)_url(\.url)?|\.file(\.file_id)?|(?<sound>\.audio))?(?= )/; // the clip, or its sound

export function clearErrors() {
  for (const id of ["file-error", "films-error", "token-error", "question-error"]) byId(id).textContent = "";
}

// clipName: what the clip is called in place of its field. What the user stopped is no error.
export function showError(error, clipName) {
  if (error.name === "AbortError") return;
  if (error.status === 401) {
    byId("access").open = true;
    byId("token-error").textContent = error.message;
    byId("token").focus();
  } else if (CLIP_FIELD.test(error.message)) {
    byId("file-error").textContent = error.message.replace(CLIP_FIELD, (...found) => (found.at(-1).sound ? `The sound of ${clipName}` : clipName));
  } else {
    byId("question-error").textContent = error.message;
  }
}
