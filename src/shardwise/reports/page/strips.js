// Narrow spans as pixels: a line of them for each lane, drawn at the lane's height in one go.

const scratch = document.createElement("canvas");
const parsed = new Map();

/** The numbers of a colour as the browser writes it. @param {string} text "rgb(31, 119, 184)" */
function numbers(text) {
  let found = parsed.get(text);
  if (!found)
    parsed.set(text, (found = (text.match(/[\d.]+/g) ?? [0, 0, 0]).slice(0, 3).map(Number)));
  return found;
}

/** Lines of pixels, one after the other in one picture. */
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

  /** Draw the lines, each over its part of the height. @param {{y: number, height: number}[]} places */
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
