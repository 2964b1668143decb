// The picture of a model that takes images: drawn by hand, or read from a file, on one canvas.
// Knows the canvas; does not know models beyond the size that they read.

const DRAWN_SIDE = 224;
const BRUSH_SHARE = 1 / 12;

/** The canvas is what is sent; `changed` is called after each stroke and each file. */
export function createPicture(canvas, file, clear, changed) {
  const pen = canvas.getContext("2d");
  let [stroke, drawn] = [null, false];

  function load({ height, width }) {
    const scale = Math.max(1, Math.ceil(DRAWN_SIDE / Math.max(height, width)));
    [canvas.width, canvas.height] = [width * scale, height * scale];
    wipe();
  }

  function wipe() {
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    file.value = "";
    drawn = false;
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

  canvas.addEventListener("pointerdown", (event) => {
    stroke = event.pointerId;
    canvas.setPointerCapture(stroke);
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
  clear.addEventListener("click", () => {
    wipe();
    changed();
  });
  file.addEventListener("change", async () => {
    if (!file.files.length) return;
    const bitmap = await createImageBitmap(file.files[0]).catch(() => null);
    file.setCustomValidity(bitmap ? "" : "This file is no image that the browser can read.");
    file.reportValidity();
    if (!bitmap) return;
    pen.imageSmoothingQuality = "high";
    pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    drawn = true;
    changed();
  });

  return { load, isDrawn: () => drawn, dataUrl: () => canvas.toDataURL("image/png") };
}
