// The page's elements, and how values are written in them.

export const byId = (id) => document.getElementById(id);
export const percent = (rate) => `${Math.round(rate * 100)} %`;
export const ms = (seconds) => Math.round(seconds * 1000);

export function sizeOf(bytes) {
  if (bytes < 2 ** 20) return `${Math.ceil(bytes / 2 ** 10)} KiB`;
  const size = bytes / 2 ** 20;
  return `${size.toLocaleString("en", { maximumFractionDigits: size < 10 ? 1 : 0 })} MiB`;
}

export function element(name, properties) {
  return Object.assign(document.createElement(name), properties);
}

// A name of 128 random bits. crypto.randomUUID is there for pages from https and localhost only.
export function unique() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16)).join("-");
}

export function newArticle() {
  return byId("answer").content.cloneNode(true).firstElementChild;
}

// Shows names and values in an article.
export function list(article, values) {
  article.querySelector(".tokens").replaceChildren(...Object.entries(values).map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
    return pair;
  }));
}

// While an answer is on its way, Stop takes the place of Ask.
export function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").hidden = !isBusy;
}
