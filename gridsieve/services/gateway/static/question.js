// Questions about the chosen clip: one after the other in a conversation, or one at two rates that are compared.

import { expired, needed, partOf } from "./clip.js";
import { drawCost, drawKept } from "./drawing.js";
import { byId, element, newArticle, percent, setBusy, unique } from "./elements.js";
import { clearErrors, showError } from "./errors.js";
import { events, post } from "./server.js";
import { automatic, knowService } from "./service.js";

const COMPARED = "Both answers start alike: neither finds anything in a cache, of the other or of an earlier question. Before the "
  + "first comparison of a clip, a question about four of its frames warms the services up. Compared questions are no "
  + "conversation: each is asked without the earlier ones.";
export const STREAMED = { stream: true, stream_options: { include_usage: true } };
const WARM_UP = { mm_processor_kwargs: { num_frames: 4 }, max_completion_tokens: 1 };

let running = null; // AbortController of the question
let drawing = null; // AbortController of what is drawn of its answers; it goes on while the next question is typed
let turns = []; // {question, answer} of the conversation so far
let compared = null; // the clip that was compared last

export async function submit() {
  if (running) return;
  clearErrors();
  byId("as-text").hidden = true;
  const clip = needed();
  if (!clip) return;
  drawing?.abort();
  running = new AbortController();
  const mine = drawing = new AbortController();
  const drawn = [];
  setBusy(true);
  try {
    await knowService();
    await (byId("compare").checked ? compare : converse)(clip, running.signal, drawn);
  } catch (error) {
    showError(error, clip.file.name);
  } finally {
    running = null;
    setBusy(false);
  }
  for (const [article, bodyOf, attention] of drawn) await draw(article, clip, bodyOf, attention, mine.signal);
}

export function stop() {
  running?.abort();
}

// The next question begins another one.
export function endConversation() {
  stop();
  drawing?.abort();
  setTurns([]);
}

// The body of what Ask would send now, without the rate that is compared. part: the clip.
export function bodyNow(part) {
  return body(part, byId("compare").checked ? [] : turns, byId("question").value, ownPruning());
}

// drawn: gets each article of which tokens are drawn, the body of its question by the clip's part, and the answer's
// attention, or null.
async function converse(clip, signal, drawn) {
  if (!turns.length) byId("answers").replaceChildren();
  byId("answers").classList.add("conversation");
  byId("note").textContent = "";
  const [earlier, question, pruning] = [turns, byId("question").value, ownPruning()];
  const article = headed(pruning, question, clip);
  byId("answers").prepend(article);
  const answer = await fill(article, clip, (part) => body(part, earlier, question, pruning), signal, drawn);
  if (answer !== null && !signal.aborted) setTurns([...earlier, { question, answer }]);
}

async function compare(clip, signal, drawn) {
  setTurns([]);
  byId("answers").classList.remove("conversation");
  byId("answers").replaceChildren();
  byId("note").textContent = COMPARED;
  const [question, other] = [byId("question").value, { rate: Number(byId("other-rate").value), method: byId("method").value }];
  const prunings = [other, ownPruning()].sort((one, another) => one.rate - another.rate);
  if (compared !== clip) await ask(clip, (part) => ({ ...body(part, [], question, prunings[1]), ...WARM_UP, cache_salt: unique() }), signal);
  compared = clip;
  for (const pruning of prunings) {
    const article = headed(pruning, "", clip);
    byId("answers").append(article);
    const cache_salt = unique();
    await fill(article, clip, (part) => ({ ...body(part, [], question, pruning), cache_salt }), signal, drawn);
  }
}

function setTurns(now) {
  turns = now;
  byId("conversation").hidden = !turns.length;
}

function ownPruning() {
  if (byId("automatic").checked) return automatic();
  return { rate: Number(byId("rate").value), method: byId("method").value };
}

function body(part, earlier, question, pruning) {
  const texts = [...earlier.flatMap((turn) => [["user", turn.question], ["assistant", turn.answer]]), ["user", question]];
  const messages = texts.map(([role, text], place) => ({ role, content: place ? text : [part, { type: "text", text }] }));
  return { messages, pruning, max_completion_tokens: Number(byId("longest").value) };
}

// Images and sounds are never pruned.
function headed(pruning, question, { kind }) {
  const { rate, threshold } = kind === "video" ? pruning : { rate: 0 };
  const article = newArticle();
  const isAutomatic = threshold !== undefined;
  article.querySelector("h2").textContent = isAutomatic ? "Pruned automatically" : rate ? `Pruned by ${percent(rate)}` : "Not pruned";
  article.querySelector(".asked").textContent = question;
  article.dataset.automatic = isAutomatic ? "true" : "";
  return article;
}

// Asks, and shows the answer and its cost in the article. bodyOf: the body, by the part of the clip.
// Returns the text, or null for an answer that broke off.
async function fill(article, clip, bodyOf, signal, drawn) {
  const text = article.querySelector(".text");
  const streamed = { ...STREAMED, ...(byId("attention").checked && { attention: true }) };
  try {
    const response = await ask(clip, (part) => ({ ...bodyOf(part), ...streamed }), signal);
    const { answer, usage, attention } = await answered(article, response);
    const [{ modality, pruning_rate: rate }] = usage.gridsieve.media;
    if (article.dataset.automatic) article.querySelector("h2").textContent += `, by ${percent(rate)}`;
    if (modality === "video" || (attention && modality !== "audio")) drawn.push([article, bodyOf, attention]);
    else article.setAttribute("aria-busy", "false");
    return answer;
  } catch (error) {
    article.setAttribute("aria-busy", "false");
    if (!text.textContent) article.remove();
    else if (error.name !== "AbortError") article.querySelector(".error").textContent = error.message;
    if (!text.textContent || error.name === "AbortError") throw error;
    return null;
  }
}

// Shows a streamed answer in an article as it comes, then its cost.
export async function answered(article, response) {
  const text = article.querySelector(".text");
  let [answer, usage, attention] = ["", null, null];
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    const thought = choice?.delta.reasoning_content;
    if (thought) (text.querySelector("em") ?? text.appendChild(element("em"))).append(thought);
    answer += choice?.delta.content ?? "";
    text.append(choice?.delta.content ?? "");
    if (choice?.finish_reason === "length") text.append(" […]");
    attention = choice?.attention ?? attention;
    usage = chunk.usage;
  }
  drawCost(article, usage);
  return { answer, usage, attention };
}

// Shows which tokens of the clip were kept, and, if known, what the answer attended to.
async function draw(article, clip, bodyOf, attention, signal) {
  try {
    const told = await post("v1/gridsieve/kept", bodyOf(await partOf(clip, signal)), signal);
    await drawKept(article, (await told.json()).media[0], clip.url, attention, signal);
  } catch (error) {
    if (error.name !== "AbortError") article.querySelector(".error").textContent = error.message;
  } finally {
    article.setAttribute("aria-busy", "false");
  }
}

// Asks about the clip, again if the server has deleted its file.
async function ask(clip, bodyOf, signal) {
  const part = await partOf(clip, signal);
  try {
    return await post("v1/chat/completions", bodyOf(part), signal);
  } catch (error) {
    if (error.status !== 404 || !part.file) throw error;
    expired(clip);
    return post("v1/chat/completions", bodyOf(await partOf(clip, signal)), signal);
  }
}
