// Charts as pictures and numbers as tables, made in the browser.

function addTools(chart) {
  const menu = make("details", "menu", make("summary", "", "⋯")), list = make("div", "choices");
  menu.firstChild.setAttribute("aria-label", "save this chart");
  const add = (text, action) => {
    const button = make("button", "", text);
    button.addEventListener("click", () => { menu.open = false; action(); });
    list.append(button);
  };
  add("save as SVG", () => saveFile(fileName(chart.spec.title) + ".svg", picture(chart).text, "image/svg+xml"));
  add("save as PNG", () => savePng(chart));
  add("save as CSV", () => saveFile(fileName(chart.spec.title) + ".csv", table(chart.runs, metricsOf(chart)), "text/csv"));
  menu.append(list);
  menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) setTimeout(() => { menu.open = false; }, 200); });
  chart.figure.querySelector("h3").append(menu);
}

function metricsOf(chart) {
  if (chart.spec.stack) return [chart.spec.total, ...chart.spec.stack.map((layer) => layer.metric)];
  return [...new Set(chart.spec.lines.flatMap((line) => [line.metric, line.low, line.high].filter(Boolean)))];
}

// the chart with its title and legend as a document of its own, colours written out
function picture(chart) {
  const drawn = chart.plot.querySelector("svg"), copy = drawn.cloneNode(true);
  copy.querySelectorAll(".hair, .chosen").forEach((node) => node.remove());
  const originals = [...drawn.querySelectorAll("*")].filter((node) => !node.matches(".hair, .chosen"));
  copy.querySelectorAll("*").forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    if (["text", "path", "line", "rect", "circle"].includes(node.localName))
      for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity"]) node.setAttribute(name, style.getPropertyValue(name));
    if (node.localName === "text") { node.setAttribute("font-size", "11"); node.setAttribute("font-family", "sans-serif"); }
    node.removeAttribute("class");
  });
  const look = getComputedStyle(document.documentElement), ink = look.getPropertyValue("--ink"), back = look.getPropertyValue("--card");
  const labels = [...chart.figure.querySelectorAll(".legend li")];
  let x = 12, y = HEIGHT + 48, legend = "";
  for (const item of labels) {
    const width = 24 + 6.6 * item.textContent.length;
    if (x + width > chart.width && x > 12) { x = 12; y += 18; }
    const color = getComputedStyle(item.querySelector("i")).backgroundColor;
    legend += `<rect x="${x}" y="${y - 9}" width="10" height="10" rx="2" fill="${color}"/><text x="${x + 15}" y="${y}" font-size="12" font-family="sans-serif" fill="${ink}">${escapeHtml(item.textContent)}</text>`;
    x += width;
  }
  const height = labels.length ? y + 12 : HEIGHT + 34;
  const title = `<text x="12" y="20" font-size="14" font-weight="600" font-family="sans-serif" fill="${ink}">${escapeHtml(chart.spec.title)}</text>`;
  const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${chart.width}" height="${height}"><rect width="100%" height="100%" fill="${back}"/>${title}<g transform="translate(0 30)">${copy.innerHTML}</g>${legend}</svg>`;
  return { text, width: chart.width, height };
}

function savePng(chart) {
  const { text, width, height } = picture(chart), image = new Image(), canvas = make("canvas");
  canvas.width = 2 * width;
  canvas.height = 2 * height;
  image.onload = () => {
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => saveFile(fileName(chart.spec.title) + ".png", blob), "image/png");
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
}

function csvCell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
}

// a row a step (and run, where there are several), a column a metric; a thinned curve has the steps that are drawn
function table(runs, metrics) {
  const rows = [[...(runs.length > 1 ? ["run"] : []), "step", ...metrics]];
  for (const run of runs) {
    const columns = metrics.map((name) => pointsOf(run, name)).map((points) => new Map(points ? points.x.map((x, i) => [x, points.y[i]]) : []));
    const steps = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
    for (const step of steps) rows.push([...(runs.length > 1 ? [run.name] : []), step, ...columns.map((column) => column.get(step))]);
  }
  return rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
}
