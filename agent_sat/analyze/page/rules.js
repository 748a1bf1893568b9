"use strict";
// The rules of measures.py over the sums of sums.py; tests compare both on the same sums.

const MAXIMA = new Set(["log_ratio_abs_max"]);
const MINIMA = new Set(["contraction_min"]);

// Sums of the rows of a column table that `takes` accepts, added up per key.
function addUp(table, keyOf, takes) {
  const names = Object.keys(table).filter((name) => !["bin", "turn", "lag", "first"].includes(name));
  const groups = new Map();
  const length = (table.turn || []).length;
  for (let row = 0; row < length; row++) {
    if (!takes(row)) continue;
    const key = keyOf(row);
    let sums = groups.get(key);
    if (!sums) groups.set(key, (sums = {}));
    for (const name of names) {
      const value = table[name][row];
      if (value === null || value === undefined) continue;
      const before = sums[name];
      if (before === undefined) sums[name] = value;
      else if (MAXIMA.has(name)) sums[name] = Math.max(before, value);
      else if (MINIMA.has(name)) sums[name] = Math.min(before, value);
      else sums[name] = before + value;
    }
  }
  return groups;
}

function over(part, whole) {
  return whole > 0 ? part / whole : null;
}

// The value of a measure, null where there is nothing to divide by.
function evaluate(measure, sums) {
  if (!sums) return null;
  const parts = measure.parts.map((part) => sums[part]);
  if (parts.some((part) => part === undefined)) return null;
  let result = null;
  switch (measure.rule) {
    case "sum":
    case "extreme":
      result = parts[0];
      break;
    case "mean":
      result = over(parts[0], parts[1]);
      break;
    case "variance": {
      const [total, square, count] = parts;
      result = count > 0 ? Math.max(0, (square - (total * total) / count) / count) : null;
      break;
    }
    case "covariance": {
      const [product, x, y, count] = parts;
      result = count > 0 ? (product - (x * y) / count) / count : null;
      break;
    }
    case "effective_share": {
      const [total, square, count] = parts;
      result = over(total * total, square * count);
      break;
    }
    case "pearson": {
      const [x, y, xx, yy, xy, count] = parts;
      const spread = (xx - (x * x) / count) * (yy - (y * y) / count);
      result = over(xy - (x * y) / count, Math.sqrt(Math.max(0, spread)));
      break;
    }
  }
  return result === null ? null : result * measure.scale;
}
