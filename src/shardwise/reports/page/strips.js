// Narrow spans as pixels: a line for each lane, stretched to the lane's height at once.

const scratch = document.createElement("canvas");
const parsed = new Map();

/** The components of a colour in the browser's notation. @param {string} text "rgb(31, 119, 184)" */
function numbers(text) {
  let components = parsed.get(text);
  if (!components)
    parsed.set(text, (components = (text.match(/[\d.]+/g) ?? [0, 0, 0]).slice(0, 3).map(Number)));
  return components;
}

/** Lines of pixels in one image. */
export class Strips {
  /** @param {number} width @param {number} lines */
  constructor(width, lines) {
    this.width = Math.max(1, Math.ceil(width));
    this.lines = lines;
    this.image = new ImageData(this.width, Math.max(1, lines));
    this.used = new Uint8Array(lines);
  }

  /** Paint pixels of a line. @param {number} share of its opacity */
  paint(line, left, right, colour, share) {
    const [r, g, b] = numbers(colour);
    const { data } = this.image;
    const end = Math.min(right, this.width);
    this.used[line] = 1;
    for (let x = Math.max(0, left), at = (line * this.width + x) * 4; x < end; x++, at += 4) {
      data[at] = r;
      data[at + 1] = g;
      data[at + 2] = b;
      data[at + 3] = share * 255;
    }
  }

  /** Draw each line at its place and height. @param {{y: number, height: number}[]} places */
  draw(context, places) {
    if (!this.used.includes(1)) return;
    scratch.width = this.width;
    scratch.height = this.lines;
    scratch.getContext("2d").putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    places.forEach(({ y, height }, line) => {
      if (this.used[line])
        context.drawImage(scratch, 0, line, this.width, 1, 0, y, this.width, height);
    });
  }
}
