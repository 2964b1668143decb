// The picture of a model that takes images: drawn by hand, dropped, pasted or read from a file, on
// one canvas. Knows the canvas; does not know models beyond the size that they read.

import { element } from "./shape.js";

const DRAWN_SIDE = 112;
const BRUSH_SHARE = 1 / 12;
const NO_IMAGE = "This is no image that the browser can read.";

/** The canvas is what is sent; `changed` runs after each stroke and each file. */
export function createPicture(changed) {
  const [canvas, file, zone] = [element("canvas"), element("file"), element("picture")];
  const pen = canvas.getContext("2d");
  let [stroke, drawn] = [null, false];
  let newest = 0; // what was asked for last: a picture that is slow to read must not come over it

  function load({ height, width }) {
    const scale = Math.max(1, Math.ceil(DRAWN_SIDE / Math.max(height, width)));
    [canvas.width, canvas.height] = [width * scale, height * scale];
    wipe();
  }

  function blacken() {
    pen.globalCompositeOperation = "source-over";
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
  }

  function wipe() {
    newest += 1;
    blacken();
    file.value = "";
    drawn = false;
    say("");
  }

  function say(problem) {
    file.setCustomValidity(problem);
    element("picture-help").classList.toggle("bad", problem !== "");
    element("picture-help").textContent = problem || "Draw in the square, drop a picture on it, paste one, or choose a file.";
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) / box.width) * canvas.width,
      ((event.clientY - box.top) / box.height) * canvas.height,
    ];
  }

  function draw(event) {
    if (stroke !== event.pointerId) return;
    pen.lineTo(...place(event));
    pen.stroke();
    drawn = true;
  }

  async function show(blob) {
    newest += 1;
    const mine = newest;
    const bitmap = await createImageBitmap(blob).catch(() => null);
    if (mine !== newest) return;
    say(bitmap ? "" : NO_IMAGE);
    if (!bitmap) {
      element("status").textContent = NO_IMAGE;
      return;
    }
    blacken(); // behind one that is transparent
    pen.imageSmoothingQuality = "high";
    pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    drawn = true;
    changed();
  }

  /** A picture of a link; one that cannot be read leaves the canvas as it is. */
  async function restore(dataUrl) {
    newest += 1;
    const mine = newest;
    const image = new Image();
    image.src = dataUrl;
    await image.decode().catch(() => null);
    if (!image.naturalWidth || mine !== newest) return;
    blacken();
    pen.drawImage(image, 0, 0, canvas.width, canvas.height);
    drawn = true;
    changed();
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return; // of a menu
    stroke = event.pointerId;
    canvas.setPointerCapture(stroke);
    say("");
    pen.globalCompositeOperation = "source-over";
    pen.strokeStyle = "#fff";
    pen.lineCap = pen.lineJoin = "round";
    pen.lineWidth = BRUSH_SHARE * Math.max(canvas.width, canvas.height);
    pen.beginPath();
    pen.moveTo(...place(event));
    draw(event);
  });
  canvas.addEventListener("pointermove", draw);
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      if (stroke !== null) changed();
      stroke = null;
    });
  }
  element("wipe").addEventListener("click", () => {
    wipe();
    changed();
  });
  element("invert").addEventListener("click", () => {
    say("");
    pen.globalCompositeOperation = "difference";
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    drawn = true;
    changed();
  });
  file.addEventListener("change", () => file.files.length && show(file.files[0]));

  // A picture that misses its place must not replace the page.
  for (const name of ["dragover", "drop"]) {
    window.addEventListener(name, (event) => !zone.hidden && event.preventDefault());
  }
  zone.addEventListener("dragover", () => zone.classList.add("over"));
  for (const name of ["dragleave", "drop"]) zone.addEventListener(name, () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => event.dataTransfer.files.length && show(event.dataTransfer.files[0]));
  document.addEventListener("paste", (event) => {
    const pasted = [...event.clipboardData.files].find(({ type }) => type.startsWith("image/"));
    if (pasted && !zone.hidden) show(pasted);
  });

  return { load, restore, isDrawn: () => drawn, dataUrl: () => canvas.toDataURL("image/png") };
}
