// Every metric of the run, found by its name and drawn on demand.

function showMetrics(runs) {
  const search = document.getElementById("metric-search"), list = document.getElementById("metric-list");
  if (!search) return;
  const cards = document.getElementById("metric-cards"), count = document.getElementById("metric-count");
  const order = ["train/", "validation/", "performance/", "timing/"], rank = (name) => order.findIndex((head) => name.startsWith(head)) >>> 0;
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  const picked = new Map();
  const minor = (head) => (["lowest", "highest"].includes(head) ? "minor" : "");
  const heads = ["metric", ...runs.map((run) => (runs.length > 1 ? run.name : "last")), ...(runs.length > 1 ? [] : ["lowest", "highest", "values"])];
  list.append(make("thead", "", make("tr", "", ...heads.map((head) => make("th", minor(head), head)))));
  const body = list.appendChild(make("tbody"));
  const rows = names.map((name) => row(name));

  function row(name) {
    const box = make("input"), line = make("tr", "", make("td", "", make("label", "", box, breakable(name))));
    box.type = "checkbox";
    box.addEventListener("change", () => { toggle(name, box.checked); keep(); });
    for (const run of runs) {
      const points = pointsOf(run, name), known = points ? points.y.filter((y) => y !== null) : [];
      const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
      const cells = [points ? points.y[points.y.length - 1] : null, low, high, known.length];
      (runs.length > 1 ? cells.slice(0, 1) : cells).forEach((value, place) =>
        line.append(make("td", "number " + minor(heads[place + 1]), points && (known.length || place === 3) ? short(value) : "–")));
    }
    body.append(line);
    return { name, line, box };
  }
  function toggle(name, on) {
    if (!on) {
      const chart = picked.get(name);
      if (chart) { charts.splice(charts.indexOf(chart), 1); chart.figure.remove(); picked.delete(name); }
      return;
    }
    if (picked.has(name)) return;
    const close = make("button", "close", "×"), figure = make("figure", "card", make("h3", "", name, make("span")), make("div", "plot"));
    close.setAttribute("aria-label", "remove this chart");
    close.addEventListener("click", () => { rows.find((r) => r.name === name).box.checked = false; toggle(name, false); keep(); });
    cards.append(figure);
    picked.set(name, new Chart(figure, { title: name, zero: false, smooth: true, lines: [{ label: name, metric: name }] }, runs));
    figure.querySelector("h3").append(close);
  }
  function keep() { memory.values.picked = [...picked.keys()]; }
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { name, line } of rows) {
      line.hidden = !words.every((word) => name.toLowerCase().includes(word));
      if (!line.hidden) shown++;
    }
    count.textContent = `${shown} of ${names.length} metrics; tick one to draw it`;
    memory.values.search = search.value;
  }
  search.addEventListener("input", filter);
  search.value = memory.values.search || "";
  for (const name of memory.values.picked || []) {
    const found = rows.find((r) => r.name === name);
    if (found) { found.box.checked = true; toggle(name, true); }
  }
  filter();
  const all = document.getElementById("csv");
  if (all) all.addEventListener("click", () => saveFile(fileName(document.title) + ".csv", table(runs, names), "text/csv"));
}
