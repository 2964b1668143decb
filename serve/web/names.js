// Where the names of the points of a plot stand: none on another, none on a point. Pure: knows
// sizes and places; draws nothing.

const [ASCENT_PX, DESCENT_PX, LINE_PX] = [14, 4, 17];
const [BESIDE_PX, ABOVE_PX, BELOW_PX] = [13, 11, 22];
const LINES = 8;

/**
 * A place {x, y, anchor} for the name of each point {x, y, radius, width}: the best that is free,
 * for one point after the other. `room` is the box that names stay in, `taken` are boxes in it.
 */
export function placeNames(points, room, taken) {
  const occupied = [...taken, ...points.map(({ x, y, radius }) => boxAround(x, y, radius))];
  return points.map((point) => {
    const places = [...placesOf(point)];
    const isFree = (place) => {
      const box = boxOf(place, point.width);
      return holds(room, box) && !occupied.some((other) => meet(box, other));
    };
    const place = places.find(isFree) ?? places[0];
    occupied.push(boxOf(place, point.width));
    return place;
  });
}

/** Beside the point, above it and below it; then the same a line further away. */
function* placesOf({ x, y }) {
  for (let line = 0; line < LINES; line += 1) {
    const [above, below] = [y - ABOVE_PX - line * LINE_PX, y + BELOW_PX + line * LINE_PX];
    for (const [at, anchor] of [[x + BESIDE_PX, "start"], [x - BESIDE_PX, "end"], [x, "middle"]]) {
      yield { x: at, y: above, anchor };
      yield { x: at, y: below, anchor };
    }
  }
}

function boxOf({ x, y, anchor }, width) {
  const left = x - { start: 0, middle: width / 2, end: width }[anchor];
  return { left, right: left + width, top: y - ASCENT_PX, bottom: y + DESCENT_PX };
}

export const boxAround = (x, y, radius) => ({ left: x - radius, right: x + radius, top: y - radius, bottom: y + radius });

const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const holds = (room, box) => room.left <= box.left && box.right <= room.right && room.top <= box.top && box.bottom <= room.bottom;
