// Puts the page together; while a run goes, loads it anew without losing the reader's place.

function showAge() {
  const body = document.body, age = document.getElementById("age");
  if (!age) return;
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(body.dataset.written)));
  const text = seconds < 90 ? seconds + " s" : seconds < 5400 ? Math.round(seconds / 60) + " min" : seconds < 172800 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " days";
  age.textContent = "updated " + text + " ago" + (body.dataset.status === "running" && seconds > 1800 ? ": the run may have ended without a word" : "");
}

function rememberPlace() {
  const values = memory.values, box = document.activeElement;
  values.scroll = window.scrollY;
  values.height = document.documentElement.scrollHeight;
  values.open = [...document.querySelectorAll("details[id]")].filter((node) => node.open).map((node) => node.id);
  values.zooms = charts.map((chart) => [chart.spec.title, chart.zoom]).filter((pair) => pair[1]);
  values.smooth = settings.smooth;
  values.inner = [...document.querySelectorAll(".scroll.tall")].map((node) => node.scrollTop);
  values.caret = box && box.id === "metric-search" ? [box.selectionStart, box.selectionEnd] : null;
  memory.save();
}

// what the reader does is kept at once: what is kept while a page goes may come too late for the next one
function keepPlace() {
  let waiting = 0;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(rememberPlace, 200); };
  for (const kind of ["scroll", "toggle", "input", "change", "click", "pointerup", "dblclick"]) addEventListener(kind, soon, { capture: true, passive: true });
  addEventListener("pagehide", rememberPlace);
}

function restorePlace() {
  const values = memory.values;
  for (const id of values.open || []) { const node = document.getElementById(id); if (node) node.open = true; }
  for (const [title, zoom] of values.zooms || []) for (const chart of charts) if (chart.spec.title === title) chart.zoom = zoom;
  if (values.height) document.body.style.minHeight = values.height + "px";
  if (values.scroll) window.scrollTo({ top: values.scroll, behavior: "instant" });
}

function restoreInner() {
  const values = memory.values, search = document.getElementById("metric-search");
  document.querySelectorAll(".scroll.tall").forEach((node, i) => { node.scrollTop = (values.inner || [])[i] || 0; });
  if (search && values.caret) { search.focus({ preventScroll: true }); search.setSelectionRange(...values.caret); }
  document.body.style.minHeight = "";
  if (values.scroll) window.scrollTo({ top: values.scroll, behavior: "instant" });
}

function follow() {
  const button = document.getElementById("live");
  if (document.body.dataset.status !== "running" || !button || location.protocol === "about:") return;
  let last = Date.now();
  button.hidden = false;
  const say = () => { button.textContent = memory.values.paused ? "▶ follow" : "❚❚ live"; button.className = memory.values.paused ? "" : "on"; button.title = memory.values.paused ? "load the page anew while the run goes" : "stop loading the page anew"; };
  say();
  button.addEventListener("click", () => { memory.values.paused = !memory.values.paused; memory.save(); say(); });
  for (const kind of ["input", "pointerdown", "keydown"]) addEventListener(kind, () => { last = Math.max(last, Date.now() - (settings.reloadSeconds - 3) * 1000); }, true);
  const timer = setInterval(() => {
    const old = Date.now() / 1000 - Number(document.body.dataset.written) > 1800, wait = (old ? 6 : 1) * settings.reloadSeconds * 1000;
    if (memory.values.paused || document.hidden || Date.now() - last < wait || String(getSelection())) return;
    clearInterval(timer);  // one reload, however long it takes
    rememberPlace();
    location.reload();
  }, 500);
}

async function start() {
  history.scrollRestoration = "manual";
  showAge();
  setInterval(showAge, 5000);
  const smooth = document.getElementById("smooth");
  settings.smooth = memory.values.smooth !== false;
  if (smooth) {
    smooth.checked = settings.smooth;
    smooth.addEventListener("change", () => { settings.smooth = smooth.checked; charts.forEach((chart) => chart.draw()); });
  }
  restorePlace();
  follow();
  let data, samples;
  try {
    [data, samples] = await Promise.all([unpack("data-metrics"), unpack("data-samples")]);
  } catch (error) {
    document.querySelector("main").prepend(make("p", "muted", "This browser cannot unpack the page's data (it needs DecompressionStream): " + error));
    return;
  }
  document.querySelectorAll("figure[data-panel]").forEach((figure) => new Chart(figure, data.panels[figure.dataset.panel], data.runs));
  showMetrics(data.runs);
  showSamples(samples);
  restorePlace();
  charts.forEach((chart) => chart.draw());
  restoreInner();
  keepPlace();
  document.body.dataset.ready = "yes";
}
start();
