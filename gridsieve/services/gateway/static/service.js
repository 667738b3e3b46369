// What the service is: its model, the pruning of requests that name none, and the methods that it takes.

import { byId } from "./elements.js";
import { fetched } from "./server.js";

let thresholded = null; // the pruning whose rate follows from the clip, or null where no method has a threshold
let sounds = null; // whether the model takes sounds, or null while that is not known
let isKnown = false;

export function automatic() {
  return thresholded;
}

// Whether a question may have sounds; true while that is not known.
export function takesSounds() {
  return sounds ?? true;
}

// Reads it once, and begins the form with the service's own pruning.
export async function knowService() {
  if (isKnown) return;
  const { data: [{ id, pruning, pruning_methods: methods, ...model }] } = await (await fetched("v1/models")).json();
  isKnown = true;
  sounds = model.sounds;
  byId("hear").parentElement.hidden = !sounds;
  if (sounds) {
    byId("file").accept += ",audio/*";
    byId("drop-hint").textContent = "Drop a video, an image or a sound here, or";
  }
  byId("model").textContent = `Model: ${id}`;
  for (const option of byId("method").options) option.disabled = !methods.some(({ name }) => name === option.value);
  const offered = [...byId("method").options].filter((option) => !option.disabled).map((option) => option.value);
  byId("method").value = [pruning.method, byId("method").value, offered[0]].find((name) => offered.includes(name));
  const suggested = methods.find((method) => method.suggested_threshold !== null);
  if (pruning.threshold !== null) thresholded = pruning;
  else if (suggested) thresholded = { rate: 0, method: suggested.name, threshold: suggested.suggested_threshold };
  byId("automatic").parentElement.hidden = !thresholded;
  if (pruning.threshold !== null) byId("automatic").click();
  begin(byId("rate"), pruning.rate);
  if (pruning.rate || pruning.threshold !== null) begin(byId("other-rate"), 0);
}

// Sets a slider that the user has not moved.
function begin(slider, rate) {
  if (slider.value !== slider.defaultValue) return;
  slider.value = rate;
  slider.dispatchEvent(new Event("input"));
}
