"use strict";
// Small SVG charts with a legend, values on hover and a button that saves a PNG. No text here is ever markup.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const INK = "#1f2933", FAINT = "#d5dbe1", MUTED = "#5b6773";
const CATEGORIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#56b4e9", "#000000"]; // Okabe and Ito
const SEQUENCE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 180, 80], [200, 170, 20]]; // viridis, its light end cut
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const WIDTH = 560, HEIGHT = 300, LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 42;

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function category(index) {
  return CATEGORIES[index % CATEGORIES.length];
}

// Colour of position `share` (0 to 1) on the ordered scale: dark to light, so it also reads in grey.
function ordered(share) {
  const at = Math.min(Math.max(share, 0), 1) * (SEQUENCE.length - 1);
  const low = Math.min(Math.floor(at), SEQUENCE.length - 2);
  const mixed = SEQUENCE[low].map((value, i) => Math.round(value + (SEQUENCE[low + 1][i] - value) * (at - low)));
  return `rgb(${mixed.join(",")})`;
}

function figureText(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (unit === "share") return `${Number((100 * value).toPrecision(3))}%`;
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(3)));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

function linearTicks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push(Number(tick.toPrecision(12)));
  }
  return ticks;
}

function scale(domain, pixels, logarithmic) {
  let [low, high] = domain;
  if (logarithmic) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    if (high - low < 0.5) [low, high] = [low - 0.25, high + 0.25];
  } else if (low === high) {
    const room = Math.abs(low) * 0.1;
    [low, high] = room ? [low - room, high + room] : [0, 1];
  }
  const at = (value) => pixels[0] + (((logarithmic ? Math.log10(value) : value) - low) / (high - low)) * (pixels[1] - pixels[0]);
  let ticks;
  if (logarithmic) {
    ticks = [];
    for (let power = Math.ceil(low); power <= Math.floor(high); power++) ticks.push(10 ** power);
    if (ticks.length < 2) ticks = linearTicks(10 ** low, 10 ** high, 4).filter((tick) => tick > 0);
    while (ticks.length > 7) ticks = ticks.filter((_, index) => index % 2 === 0);
  } else ticks = linearTicks(low, high, 5);
  return { at, ticks };
}

// A frame with axes; gives the SVG and the two scales, or null where there is nothing to draw.
function frame(options, xs, ys) {
  let xDomain = options.xDomain || extent(options.logX ? xs.filter((x) => x > 0) : xs);
  let yDomain = options.yDomain || extent(options.logY ? ys.filter((y) => y > 0) : ys);
  if (!xDomain || !yDomain) return null;
  if (!options.logY && !options.yDomain && yDomain[0] > 0 && yDomain[0] < 0.7 * yDomain[1]) yDomain = [0, yDomain[1]];
  const width = options.wide ? 2 * WIDTH : WIDTH;
  const x = scale(xDomain, [LEFT, width - RIGHT], options.logX);
  const y = scale(yDomain, [HEIGHT - BOTTOM, TOP], options.logY);
  const root = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": options.title, "font-family": "system-ui, sans-serif", "font-size": 12 });
  root.append(shape("rect", { x: 0, y: 0, width: width, height: HEIGHT, fill: "#fff" }));
  for (const tick of y.ticks) {
    root.append(shape("line", { x1: LEFT, x2: width - RIGHT, y1: y.at(tick), y2: y.at(tick), stroke: FAINT }));
    root.append(shape("text", { x: LEFT - 7, y: y.at(tick) + 4, "text-anchor": "end", fill: MUTED }, figureText(tick, options.yUnit)));
  }
  for (const tick of x.ticks) {
    if (options.wholeX && !Number.isInteger(tick)) continue;
    root.append(shape("line", { x1: x.at(tick), x2: x.at(tick), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4, stroke: MUTED }));
    root.append(shape("text", { x: x.at(tick), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle", fill: MUTED }, figureText(tick)));
  }
  root.append(shape("line", { x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, stroke: MUTED }));
  root.append(shape("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle", fill: INK }, options.xLabel || ""));
  root.append(shape("text", { x: 14, y: (TOP + HEIGHT - BOTTOM) / 2, "text-anchor": "middle", fill: INK, transform: `rotate(-90 14 ${(TOP + HEIGHT - BOTTOM) / 2})` }, options.yLabel || ""));
  return { root, x, y, width };
}

const MARKERS = [
  (x, y, r) => shape("circle", { cx: x, cy: y, r }),
  (x, y, r) => shape("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r }),
  (x, y, r) => shape("path", { d: `M${x} ${y - 1.3 * r}L${x + 1.2 * r} ${y + r}L${x - 1.2 * r} ${y + r}Z` }),
  (x, y, r) => shape("path", { d: `M${x} ${y - 1.4 * r}L${x + 1.4 * r} ${y}L${x} ${y + 1.4 * r}L${x - 1.4 * r} ${y}Z` }),
];

function marker(index, x, y, radius, color) {
  const node = MARKERS[index % MARKERS.length](x, y, radius);
  node.setAttribute("fill", color);
  return node;
}

// series: [{name, color, index, points: [[x, y, note]], band: [[x, low, high]], bare}] ; bars: error bars from band.
function lineChart(options) {
  const drawn = options.series.map((one) => ({ ...one, points: one.points.filter(([x, y]) => x !== null && y !== null && (!options.logY || y > 0) && (!options.logX || x > 0)) }));
  const bands = drawn.flatMap((one) => one.band || []);
  const ys = [...drawn.flatMap((one) => one.points.map((p) => p[1])), ...bands.flatMap((b) => [b[1], b[2]])];
  const axes = frame(options, drawn.flatMap((one) => one.points.map((p) => p[0])), ys);
  if (!axes) return figure(options, null, []);
  const { root, x, y } = axes;
  const bounded = (value) => Math.min(Math.max(value, TOP), HEIGHT - BOTTOM);
  for (const one of drawn) {
    const color = one.color;
    if (one.band && one.band.length && options.errorBars) {
      for (const [at, low, high] of one.band) {
        if (low === null || high === null) continue;
        root.append(shape("line", { x1: x.at(at), x2: x.at(at), y1: bounded(y.at(low)), y2: bounded(y.at(high)), stroke: color, "stroke-width": 2 }));
      }
    } else if (one.band && one.band.length > 1) {
      const up = one.band.map(([at, , high]) => `${x.at(at)},${bounded(y.at(high))}`);
      const down = one.band.map(([at, low]) => `${x.at(at)},${bounded(y.at(low))}`).reverse();
      root.append(shape("polygon", { points: [...up, ...down].join(" "), fill: color, "fill-opacity": 0.16 }));
    }
    const path = one.points.map(([px, py]) => `${x.at(px).toFixed(1)},${y.at(py).toFixed(1)}`).join(" ");
    if (!one.bare) root.append(shape("polyline", { points: path, fill: "none", stroke: color, "stroke-width": one.thick || 1.8, "stroke-dasharray": DASHES[(one.index || 0) % DASHES.length] }));
    const every = Math.max(1, Math.floor(one.points.length / 12));
    if (!one.plain) one.points.forEach(([px, py], i) => { if (i % every === 0) root.append(marker(one.index || 0, x.at(px), y.at(py), one.bare ? 4 : 2.8, color)); });
  }
  return figure(options, root, drawn, (event, tip) => nearestX(event, root, drawn, x, options, tip));
}

function nearestX(event, root, series, x, options, tip) {
  const at = pointer(event, root)[0];
  const xs = [...new Set(series.flatMap((one) => one.points.map((p) => p[0])))];
  if (!xs.length) return;
  const near = xs.reduce((best, value) => (Math.abs(x.at(value) - at) < Math.abs(x.at(best) - at) ? value : best));
  const lines = [`${options.xLabel || "x"} ${figureText(near)}`];
  for (const one of series) {
    const point = one.points.find((p) => p[0] === near);
    if (point) lines.push(`${one.name}: ${figureText(point[1], options.yUnit)}${point[2] ? "  " + point[2] : ""}`);
  }
  showTip(tip, event, lines);
}

// groups: [{name, color, index, points: [[x, y, note]]}], curves: [{name, color, points, dash}]
function scatterChart(options) {
  const curves = options.curves || [];
  const all = options.groups.flatMap((group) => group.points);
  const axes = frame(options, all.map((p) => p[0]), all.map((p) => p[1]));
  if (!axes) return figure(options, null, []);
  const { root, x, y } = axes;
  const inside = (p) => x.at(p[0]) >= LEFT && x.at(p[0]) <= axes.width - RIGHT && y.at(p[1]) >= TOP && y.at(p[1]) <= HEIGHT - BOTTOM;
  for (const group of options.groups) {
    const layer = shape("g", { "fill-opacity": group.opacity || 0.55 });
    for (const point of group.points) if (inside(point)) layer.append(marker(group.index || 0, x.at(point[0]), y.at(point[1]), 2.4, group.color));
    root.append(layer);
  }
  for (const curve of curves) {
    const path = curve.points.filter(inside).map((p) => `${x.at(p[0]).toFixed(1)},${y.at(p[1]).toFixed(1)}`).join(" ");
    root.append(shape("polyline", { points: path, fill: "none", stroke: curve.color, "stroke-width": 1.8, "stroke-dasharray": curve.dash || "" }));
  }
  const legend = [...options.groups, ...curves.map((curve) => ({ ...curve, line: true }))];
  return figure(options, root, legend, (event, tip) => {
    const [px, py] = pointer(event, root);
    let best = null, least = 150;
    for (const group of options.groups) {
      for (const point of group.points) {
        const distance = (x.at(point[0]) - px) ** 2 + (y.at(point[1]) - py) ** 2;
        if (distance < least) [best, least] = [[group, point], distance];
      }
    }
    if (best) showTip(tip, event, [best[0].name, `${options.xLabel}: ${figureText(best[1][0])}`, `${options.yLabel}: ${figureText(best[1][1])}`, ...(best[1][2] || [])]);
    else tip.hidden = true;
  });
}

function pointer(event, root) {
  const box = root.getBoundingClientRect();
  return [((event.clientX - box.left) / box.width) * root.viewBox.baseVal.width, ((event.clientY - box.top) / box.height) * HEIGHT];
}

function showTip(tip, event, lines) {
  tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
  tip.hidden = false;
  const box = tip.parentElement.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4)}px`;
  tip.style.top = `${event.clientY - box.top + 14}px`;
}

function figure(options, root, entries, onMove) {
  const tip = element("div", { class: "tip", hidden: true });
  const title = element("figcaption", {}, element("strong", {}, options.title), options.definition ? info(options.definition) : null);
  const box = element("figure", { class: options.wide ? "wide" : "" }, title);
  if (!root) {
    box.append(element("p", { class: "empty" }, options.empty || "Nothing was recorded for this choice of steps and turns."));
    return box;
  }
  const legend = element("div", { class: "legend" });
  for (const one of entries.filter((entry) => entry.name && !entry.quiet)) {
    const key = shape("svg", { width: 26, height: 12, viewBox: "0 0 26 12" });
    if (one.points && !one.bare && (one.line || options.series)) key.append(shape("line", { x1: 1, x2: 25, y1: 6, y2: 6, stroke: one.color, "stroke-width": 2, "stroke-dasharray": one.line ? one.dash || "" : DASHES[(one.index || 0) % DASHES.length] }));
    if (!one.line && !one.plain) key.append(marker(one.index || 0, 13, 6, 3.2, one.color));
    legend.append(element("span", {}, key, one.name));
  }
  if (onMove) {
    root.addEventListener("mousemove", (event) => onMove(event, tip));
    root.addEventListener("mouseleave", () => { tip.hidden = true; });
  }
  title.append(element("button", { class: "save", type: "button", title: "save this plot as PNG", onclick: () => savePng(root, options.title) }, "PNG"));
  box.append(legend, root, tip);
  if (options.note) box.append(element("p", { class: "note" }, options.note));
  return box;
}

function info(text) {
  return element("span", { class: "info", tabindex: 0, title: text, "aria-label": text }, "?");
}

function pngOf(root, factor = 2) {
  return new Promise((resolve, reject) => {
    const copy = root.cloneNode(true);
    copy.setAttribute("xmlns", SVG_SPACE);
    const width = root.viewBox.baseVal.width * factor, height = HEIGHT * factor;
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    const image = new Image();
    image.onload = () => {
      const canvas = element("canvas", { width, height });
      canvas.getContext("2d").drawImage(image, 0, 0);
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no PNG"))), "image/png");
    };
    image.onerror = () => reject(new Error("the plot could not be drawn"));
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  });
}

async function savePng(root, title) {
  const address = URL.createObjectURL(await pngOf(root));
  element("a", { href: address, download: title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60) + ".png" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// A table with definitions on its headings. columns: [{title, meaning, unit, text, of: row => value or text}]
function dataTable(columns, rows) {
  const head = element("tr", {}, columns.map((column) => element("th", { title: column.meaning || null, class: [column.meaning ? "defined" : "", column.text ? "text" : ""].join(" ").trim() || null }, column.title)));
  const body = rows.map((row) => element("tr", {}, columns.map((column) => {
    const value = column.of(row);
    return element("td", { class: column.text ? "text" : null }, typeof value === "string" || value instanceof Node ? value : figureText(value, column.unit));
  })));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, body)));
}

function tabs(host, pages, onShow) {
  const bar = element("nav", { role: "tablist" });
  const show = (name) => {
    for (const button of bar.children) button.setAttribute("aria-selected", String(button.dataset.name === name));
    onShow(name);
  };
  for (const name of pages) bar.append(element("button", { role: "tab", type: "button", "data-name": name, onclick: () => { history.replaceState(null, "", "#" + name.replaceAll(" ", "-")); show(name); } }, name));
  host.append(bar);
  const wanted = decodeURIComponent(location.hash.slice(1)).replaceAll("-", " ");
  show(pages.includes(wanted) ? wanted : pages[0]);
}
