// Lines and stacked bars, drawn at the size that they have on the screen.

const charts = [];
const settings = { smooth: true, reloadSeconds: 10 };
const HEIGHT = 200, COLORS = 9;

function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0 && Number.isFinite(span))) return [low];
  let step = 10 ** Math.floor(Math.log10(span / count));
  step *= [1, 2, 5, 10].reduce((a, b) => (Math.abs(span / (step * b) - count) < Math.abs(span / (step * a) - count) ? b : a));
  const list = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) list.push(Number((i * step).toPrecision(12)));
  return list;
}

// the mean around each point, nearer ones counting more; symmetric, so that a rising curve does not lag
function runningMean(ys, half) {
  return ys.map((_, i) => {
    let total = 0, weight = 0;
    for (let k = Math.max(0, i - half); k <= Math.min(ys.length - 1, i + half); k++) {
      if (ys[k] === null) continue;
      const share = half + 1 - Math.abs(k - i);
      total += share * ys[k];
      weight += share;
    }
    return weight ? total / weight : null;
  });
}

function valueRange(values, zero) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) return low === 0 ? [-1, 1] : low > 0 ? [0, 1.25 * low] : [1.25 * low, 0];
  if (zero && low >= 0) return [0, high * 1.06];
  const pad = (high - low) * 0.06;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

class Chart {
  constructor(figure, spec, runs) {
    Object.assign(this, { figure, spec, runs, zoom: null, width: 0 });
    this.plot = figure.querySelector(".plot");
    this.lines = spec.stack ? [] : this.collect();
    this.bars = spec.stack ? this.stacks() : [];
    this.addLegend();
    addTools(this);
    charts.push(this);
    new ResizeObserver(() => { if (this.plot.clientWidth !== this.width) this.draw(); }).observe(this.plot);
    this.listen();
  }

  collect() {
    const many = this.runs.length > 1, lines = [];
    this.spec.lines.forEach((line, place) => this.runs.forEach((run, number) => {
      const points = pointsOf(run, line.metric);
      if (!points) return;
      const label = many ? run.name + (this.spec.lines.length > 1 ? ", " + line.label : "") : line.label;
      const bounds = [line.low, line.high].map((name) => (name ? pointsOf(run, name) : null));
      lines.push({ ...points, label, metric: line.metric, color: (many ? number : place) % COLORS, dash: many ? place : 0,
        low: bounds[0] && bounds[1] && bounds[0].y, high: bounds[0] && bounds[1] && bounds[1].y });
    }));
    return lines;
  }

  stacks() {
    const run = this.runs[0], total = pointsOf(run, this.spec.total);
    if (!total) return [];
    const layers = this.spec.stack.map((layer) => {
      const points = pointsOf(run, layer.metric), at = new Map(points ? points.x.map((x, i) => [x, points.y[i]]) : []);
      return { ...layer, y: total.x.map((x) => at.get(x) || 0) };
    });
    const rest = total.y.map((y, i) => Math.max(y - layers.reduce((sum, l) => sum + (l.beside ? 0 : l.y[i]), 0), 0));
    this.layers = [...layers, { ...this.spec.other, y: rest }];
    const size = Math.ceil(total.x.length / 120), bars = [];
    for (let i = 0; i < total.x.length; i += size) {
      const end = Math.min(i + size, total.x.length);
      bars.push({ from: total.x[i], to: total.x[end - 1],
        parts: this.layers.map((layer) => layer.y.slice(i, end).reduce((a, b) => a + b, 0) / (end - i)) });
    }
    return bars;
  }

  addLegend() {
    const items = this.spec.stack ? this.layers || [] : this.lines.length > 1 ? this.lines : [];
    if (!items.length) return;
    this.figure.append(make("ul", "legend", ...items.map((item) => {
      const mark = make("i", "b" + item.color + (item.dash ? " d" + item.dash : "")), row = make("li", "", mark, item.label);
      if (item.share !== undefined) row.append(" ", make("b", "", (100 * item.share).toFixed(1) + " %"));
      return row;
    })));
  }

  frame(x0, x1, y0, y1, labels) {
    const left = Math.max(34, 10 + 6.4 * Math.max(...labels.map((t) => t.length))), right = this.width - 10, top = 8, bottom = HEIGHT - 22;
    return { x0, x1, y0, y1, left, right, top, bottom,
      px: (x) => left + ((x - x0) / (x1 - x0 || 1)) * (right - left), py: (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top) };
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    const body = this.spec.stack ? this.drawBars() : this.drawLines();
    const label = escapeHtml(this.spec.title);
    this.plot.innerHTML = `<svg role="img" aria-label="${label}" width="${this.width}" height="${HEIGHT}" viewBox="0 0 ${this.width} ${HEIGHT}">${body}</svg>`;
  }

  grid(f, xs) {
    let out = "";
    for (const y of ticks(f.y0, f.y1, 4)) {
      const py = f.py(y).toFixed(1);
      out += `<line class="gridline" x1="${f.left}" x2="${f.right}" y1="${py}" y2="${py}"/><text x="${f.left - 6}" y="${+py + 3.5}" text-anchor="end">${short(y)}</text>`;
    }
    out += `<line class="axis" x1="${f.left}" x2="${f.right}" y1="${f.bottom}" y2="${f.bottom}"/>`;
    for (const [px, text] of xs) {
      const anchor = px > f.right - 12 ? "end" : px < f.left + 8 ? "start" : "middle";
      out += `<text x="${px.toFixed(1)}" y="${f.bottom + 15}" text-anchor="${anchor}">${text}</text>`;
    }
    return out;
  }

  drawLines() {
    const inside = (x) => !this.zoom || (x >= this.zoom[0] && x <= this.zoom[1]);
    const xs = [], ys = [];
    for (const line of this.lines) line.x.forEach((x, i) => {
      if (line.y[i] === null || !inside(x)) return;
      xs.push(x);
      ys.push(line.y[i]);
      if (line.low && line.low[i] !== undefined && line.low[i] !== null) ys.push(line.low[i], line.high[i]);
    });
    if (!ys.length) return `<text x="${this.width / 2}" y="${HEIGHT / 2}" text-anchor="middle">no values</text>`;
    const [y0, y1] = valueRange(ys, this.spec.zero);
    let x0 = this.zoom ? this.zoom[0] : Math.min(...xs), x1 = this.zoom ? this.zoom[1] : Math.max(...xs);
    if (x0 === x1) [x0, x1] = [Math.max(0, x0 - 1), x1 + 1]; // no step lies before 0
    const f = (this.f = this.frame(x0, x1, y0, y1, ticks(y0, y1, 4).map(short)));
    const steps = ticks(x0, x1, Math.max(2, Math.min(6, this.width / 90))).filter(Number.isInteger);
    const clip = "clip" + charts.indexOf(this);
    let out = `<clipPath id="${clip}"><rect x="${f.left - 2}" y="0" width="${f.right - f.left + 4}" height="${HEIGHT}"/></clipPath>`;
    out += this.grid(f, steps.map((x) => [f.px(x), short(x)])) + `<g clip-path="url(#${clip})">`;
    for (const line of this.lines) if (line.low) out += this.band(line, f);
    for (const line of this.lines) out += this.line(line, f);
    return out + "</g>";
  }

  band(line, f) {
    const known = line.x.map((x, i) => i).filter((i) => line.low[i] !== null && line.low[i] !== undefined && line.high[i] !== null);
    if (known.length === 1) {
      const [i] = known, x = f.px(line.x[i]).toFixed(1);
      return `<line class="bar s${line.color}" x1="${x}" x2="${x}" y1="${f.py(line.low[i]).toFixed(1)}" y2="${f.py(line.high[i]).toFixed(1)}"/>`;
    }
    const point = (i, ys) => f.px(line.x[i]).toFixed(1) + " " + f.py(ys[i]).toFixed(1);
    const way = [...known.map((i) => point(i, line.high)), ...known.reverse().map((i) => point(i, line.low))];
    return way.length ? `<path class="band f${line.color}" d="M${way.join("L")}Z"/>` : "";
  }

  line(line, f) {
    const classes = `s${line.color}` + (line.dash ? ` d${line.dash}` : "");
    const smooth = this.spec.smooth && settings.smooth && line.y.length >= 12;
    let out = `<path class="${smooth ? "raw" : "line"} ${classes}" d="${this.path(line.x, line.y, f)}"/>`;
    if (smooth) {
      const { x, y } = line.means || line;
      out += `<path class="line ${classes}" d="${this.path(x, runningMean(y, Math.max(2, Math.round(y.length / 25))), f)}"/>`;
    }
    if (line.y.length <= 12) line.y.forEach((y, i) => {
      if (y !== null) out += `<circle class="f${line.color}" cx="${f.px(line.x[i]).toFixed(1)}" cy="${f.py(y).toFixed(1)}" r="2.6"/>`;
    });
    return out;
  }

  path(xs, ys, f) {
    let out = "", down = false;
    xs.forEach((x, i) => {
      if (ys[i] !== null) out += (down ? "L" : "M") + f.px(x).toFixed(1) + " " + f.py(ys[i]).toFixed(1);
      down = ys[i] !== null;
    });
    return out;
  }

  drawBars() {
    if (!this.bars.length) return "";
    const high = Math.max(...this.bars.map((bar) => bar.parts.reduce((a, b) => a + b, 0))) || 1;
    const f = (this.f = this.frame(0, this.bars.length, 0, high * 1.05, ticks(0, high * 1.05, 4).map(short)));
    const width = (f.right - f.left) / this.bars.length, gap = width > 4 ? 1 : 0, places = new Set([0, this.bars.length >> 1, this.bars.length - 1]);
    let out = this.grid(f, [...places].map((i) => [f.left + (i + 0.5) * width, short(this.bars[i].from)]));
    this.bars.forEach((bar, i) => {
      let base = 0;
      bar.parts.forEach((value, k) => {
        if (value <= 0) return;
        const top = f.py(base + value);
        out += `<rect class="f${this.layers[k].color}" x="${(f.left + i * width + gap / 2).toFixed(1)}" y="${top.toFixed(1)}" width="${(width - gap).toFixed(1)}" height="${(f.py(base) - top).toFixed(2)}"/>`;
        base += value;
      });
    });
    return out;
  }

  listen() {
    let from = null;
    const place = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    this.plot.addEventListener("pointermove", (event) => this.point(place(event), from));
    this.plot.addEventListener("pointerleave", () => { if (from === null) this.unpoint(); });
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0 || this.spec.stack || !this.f) return;
      from = place(event);
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointerup", (event) => {
      const to = place(event), start = from;
      from = null;
      if (start !== null && Math.abs(to - start) > 8) this.zoomTo(this.stepAt(Math.min(start, to)), this.stepAt(Math.max(start, to)));
    });
    this.plot.addEventListener("dblclick", () => this.zoomTo(null));
  }

  zoomTo(low, high) {
    this.zoom = low === null ? null : [low, high];
    this.unpoint();
    this.draw();
  }

  stepAt(px) {
    const f = this.f;
    return f.x0 + ((Math.min(Math.max(px, f.left), f.right) - f.left) / (f.right - f.left)) * (f.x1 - f.x0);
  }

  // a cross-hair with the values under it; while a range is dragged, its area
  point(px, from) {
    this.unpoint();
    if (!this.f || !this.plot.firstChild) return;
    const f = this.f, found = this.spec.stack ? this.barAt(px) : this.nearest(this.stepAt(px));
    if (!found) return;
    const mark = document.createElementNS("http://www.w3.org/2000/svg", from === null ? "line" : "rect");
    const set = (names) => { for (const name in names) mark.setAttribute(name, names[name]); };
    if (from === null) set({ class: "hair", x1: found.px, x2: found.px, y1: f.top, y2: f.bottom });
    else set({ class: "chosen", x: Math.min(from, px), width: Math.abs(px - from), y: f.top, height: f.bottom - f.top });
    this.plot.firstChild.append(mark);
    this.mark = mark;
    this.tip = make("div", "tip", make("b", "", found.title));
    for (const [color, text] of found.rows) this.tip.append(make("div", "", make("i", "b" + color), text));
    this.plot.append(this.tip);
    const space = this.width - this.tip.offsetWidth;
    this.tip.style.left = Math.max(0, Math.min(space, found.px > this.width / 2 ? found.px - this.tip.offsetWidth - 10 : found.px + 10)) + "px";
  }

  unpoint() {
    for (const node of [this.mark, this.tip]) if (node) node.remove();
    this.mark = this.tip = null;
  }

  nearest(step) {
    let at = null;
    for (const line of this.lines) for (const x of line.x) if (at === null || Math.abs(x - step) < Math.abs(at - step)) at = x;
    if (at === null) return null;
    const rows = [];
    for (const line of this.lines) {
      const i = line.x.indexOf(at);
      if (i < 0) continue;
      let text = (this.lines.length > 1 ? line.label + "  " : "") + short(line.y[i]);
      if (line.low && line.low[i] !== undefined && line.low[i] !== null) text += ` (${short(line.low[i])} to ${short(line.high[i])})`;
      rows.push([line.color, text]);
    }
    return { px: this.f.px(at), title: "step " + at, rows };
  }

  barAt(px) {
    const f = this.f, width = (f.right - f.left) / this.bars.length, i = Math.floor((px - f.left) / width), bar = this.bars[i];
    if (!bar) return null;
    const rows = bar.parts.map((value, k) => [this.layers[k].color, this.layers[k].label + "  " + short(value) + " s"]).filter((row, k) => bar.parts[k] > 0);
    return { px: f.left + (i + 0.5) * width, title: bar.from === bar.to ? "step " + bar.from : `steps ${bar.from} to ${bar.to}, mean`, rows: rows.reverse() };
  }
}
