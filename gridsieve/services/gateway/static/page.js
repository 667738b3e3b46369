// Begins the page, and lets its parts take turns: a question about a clip, or a camera that is watched, the browser's own or one with a URL.

import * as camera from "./camera.js";
import { choose, forget, isUploaded, needed } from "./clip.js";
import { byId, percent } from "./elements.js";
import { clearErrors, showError } from "./errors.js";
import { askAbout, find, showFilms, stopFilms } from "./films.js";
import { bodyNow, endConversation, stop, submit } from "./question.js";
import { fetched, version } from "./server.js";
import { knowService } from "./service.js";
import { curl, python } from "./snippets.js";

const DEMO = "page/demo.mp4";

// The clip

function take(file, source = null) {
  camera.leave();
  endConversation();
  byId("as-text").hidden = true;
  choose(file, source);
}

byId("file").addEventListener("change", ({ target }) => { if (target.files[0]) take(target.files[0]); });
byId("demo").addEventListener("click", async () => {
  clearErrors();
  try {
    const answer = await fetched(DEMO);
    take(new File([await answer.blob()], "demo.mp4", { type: "video/mp4" }), DEMO);
  } catch (error) {
    showError(error);
    return;
  }
  byId("question").value ||= "What moves?";
  byId("compare").checked = true;
  byId("compare").dispatchEvent(new Event("change"));
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
document.addEventListener("dragleave", () => byId("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").classList.remove("over");
  if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
});

// The camera

for (const button of [byId("camera"), byId("watch")]) {
  button.addEventListener("click", () => (camera.isOn(button) ? camera.leave() : camera.watch(button, () => {
    endConversation();
    forget();
  })));
}
byId("source").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // it would ask
  if (!camera.isOn(byId("watch"))) byId("watch").click();
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
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // isComposing: Enter ends a word of Japanese
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  stopFilms();
  if (camera.isOn()) camera.ask();
  else submit();
});
byId("stop").addEventListener("click", () => (camera.isOn() ? camera.stopAnswer() : stop()));
byId("new").addEventListener("click", () => {
  endConversation();
  byId("answers").replaceChildren();
  byId("question").focus();
});

// The films

byId("films").addEventListener("submit", (event) => {
  event.preventDefault();
  find();
});
byId("ask-films").addEventListener("click", () => {
  if (!byId("films").reportValidity()) return;
  camera.leave();
  askAbout();
});
byId("stop-films").addEventListener("click", stopFilms);

// The question as text for other programs

for (const [id, written] of [["curl", curl], ["python", python]]) {
  byId(id).addEventListener("click", async () => {
    clearErrors();
    const clip = needed();
    if (!clip || !byId("ask").reportValidity()) return;
    try {
      await copy(written(clip, bodyNow, { uploads: isUploaded(clip, await version()), hasToken: byId("token").value !== "" }), clip);
    } catch (error) {
      showError(error, clip.file.name);
    }
  });
}

async function copy(text, clip) {
  byId("text").value = text;
  byId("as-text").hidden = false;
  const where = clip.source ? "" : ` It reads ${clip.file.name} from the folder that it runs in.`;
  try {
    await navigator.clipboard.writeText(text);
    byId("copied").textContent = `Copied.${where}`;
  } catch { // browsers give the clipboard to pages from https or localhost only, and where the user lets them
    byId("copied").textContent = `Copy this text.${where}`;
    byId("text").select();
  }
}

// At the start

fetch(DEMO, { method: "HEAD" }).then((answer) => { byId("demo").hidden = !answer.ok; }, () => {});
know();
showFilms().catch(() => {}); // know() tells that the server is gone
byId("token").addEventListener("change", know);

async function know() {
  try {
    await knowService();
  } catch (error) {
    if (error.status === 401) byId("access").open = true;
    else showError(error);
  }
}
