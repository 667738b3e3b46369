// A moment of a film as a picture that plays it where it is clicked. Two pages draw moments: the gateway's, which imports
// this file, and the one of `gridsieve search --sheet`, which has it inside.

// moment: {file, start_s, end_s, score, picture: the URL of a frame or "", film: the URL of the film}
export function figureOf({ file, start_s: start, end_s: end, score, picture, film }) {
  const [figure, video, caption] = ["figure", "video", "figcaption"].map((name) => document.createElement(name));
  const times = `${start.toFixed(1)} to ${end.toFixed(1)} s`;
  Object.assign(video, { playsInline: true, tabIndex: 0, role: "button", ariaLabel: `Play ${file}, ${times}` });
  if (picture) Object.assign(video, { poster: picture, preload: "none", src: film });
  else Object.assign(video, { preload: "metadata", src: `${film}#t=${(start + end) / 2}` });
  const play = () => {
    video.currentTime = start;
    video.play().catch(() => {}); // what cannot be played is an error of the element
  };
  video.addEventListener("click", play);
  video.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    play();
  });
  video.addEventListener("timeupdate", () => { if (video.currentTime >= end) video.pause(); });
  video.addEventListener("error", () => { note.textContent = "The film cannot be played."; });
  const note = document.createElement("em");
  caption.append(file, document.createElement("br"), `${times} · ${score.toFixed(3)} `, note);
  figure.append(video, caption);
  return figure;
}
