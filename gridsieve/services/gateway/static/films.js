// The folder of films: moments that a text describes, which play where they are clicked, and a question about the best.

import { byId, newArticle } from "./elements.js";
import { clearErrors, showError } from "./errors.js";
import { figureOf } from "./figure.js";
import { answered, endConversation, STREAMED } from "./question.js";
import { post, version } from "./server.js";

const BEST = 4; // moments that a question is about

let running = null; // AbortController of the search or the question

export async function showFilms() {
  byId("films").hidden = !(await version()).moments;
}

export function find() {
  return run(async (signal) => { await found({}, signal); });
}

export function askAbout() {
  return run(async (signal) => {
    const content = await found({ limit: BEST }, signal);
    const question = byId("sought").value;
    endConversation();
    byId("note").textContent = "";
    const article = newArticle();
    article.querySelector(".asked").textContent = question;
    byId("answers").replaceChildren(article);
    const messages = [{ role: "user", content: [...content, { type: "text", text: question }] }];
    const body = { messages, max_completion_tokens: Number(byId("longest").value), ...STREAMED };
    try {
      await answered(article, await post("v1/chat/completions", body, signal));
    } catch (error) {
      if (!article.querySelector(".text").textContent) article.remove();
      throw error;
    } finally {
      article.setAttribute("aria-busy", "false");
    }
  });
}

export function stopFilms() {
  running?.abort();
}

async function run(work) {
  stopFilms();
  clearErrors();
  const mine = running = new AbortController();
  byId("stop-films").hidden = false;
  try {
    await work(mine.signal);
  } catch (error) {
    if (error.status === 401) showError(error);
    else if (error.name !== "AbortError") byId("films-error").textContent = error.message;
  } finally {
    if (running === mine) byId("stop-films").hidden = true;
  }
}

// Shows the moments that the text describes. Resolves to the same as parts of a question.
async function found(options, signal) {
  const told = await (await post("v1/gridsieve/moments", { text: byId("sought").value, ...options }, signal)).json();
  byId("found-count").textContent = told.moments.length ? "" : "The index has no moments.";
  byId("found").replaceChildren(...told.moments.map(({ film, ...moment }) => figureOf({ ...moment, film: film.slice(1) })));
  return told.content;
}
