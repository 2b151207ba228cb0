"use strict";
(function () {
  const body = document.body, written = Number(body.dataset.written) * 1000;
  function age() {
    const seconds = Math.max(0, Math.round((Date.now() - written) / 1000));
    const text = seconds < 90 ? seconds + " s" : seconds < 5400 ? Math.round(seconds / 60) + " min" : Math.round(seconds / 3600) + " h";
    let note = "updated " + text + " ago";
    if (body.dataset.status === "running" && seconds > 1800) note += ": the run may have ended without a word";
    document.getElementById("age").textContent = note;
  }
  age();
  setInterval(age, 5000);

  // a cross-hair with the values under it
  const SVG = "http://www.w3.org/2000/svg";
  for (const card of document.querySelectorAll("figure[data-chart]")) {
    const data = JSON.parse(card.dataset.chart), svg = card.querySelector("svg");
    if (!data.f) continue;
    const [x0, x1, , , left, top, right, bottom] = data.f;
    const hair = document.createElementNS(SVG, "line"), tip = document.createElement("div");
    hair.setAttribute("class", "hair");
    hair.setAttribute("y1", top);
    hair.setAttribute("y2", bottom);
    tip.className = "tip";
    card.addEventListener("mousemove", function (event) {
      const box = svg.getBoundingClientRect();
      const x = x0 + ((event.clientX - box.left) * data.w / box.width - left) / (right - left) * (x1 - x0);
      const lines = [];
      let at = null;
      for (const series of data.s) {
        let best = null;
        for (const point of series.p) if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
        if (best === null) continue;
        at = at === null ? best[0] : at;
        lines.push((data.s.length > 1 ? series.l + " " : "") + best[1]);
      }
      if (at === null) return;
      const px = left + (at - x0) / (x1 - x0) * (right - left);
      hair.setAttribute("x1", px);
      hair.setAttribute("x2", px);
      svg.appendChild(hair);
      tip.textContent = "step " + at + "\n" + lines.join("\n");
      tip.style.right = px > (left + right) / 2 ? "auto" : "12px";
      tip.style.left = px > (left + right) / 2 ? "60px" : "auto";
      card.appendChild(tip);
    });
    card.addEventListener("mouseleave", function () { hair.remove(); tip.remove(); });
  }

  // the sample browser
  const holder = document.getElementById("sample-data");
  if (!holder) return;
  const samples = JSON.parse(holder.textContent), select = document.getElementById("sample-step");
  const list = document.getElementById("sample-list"), bar = document.getElementById("sample-tags");
  const groups = new Map();
  for (const sample of samples) {
    const key = (sample.kind === "val" ? "validation, step " : "training, step ") + sample.step;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample);
  }
  let tag = "all";
  function element(name, className, text) {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function show() {
    list.replaceChildren();
    for (const sample of groups.get(select.value) || []) {
      if (tag !== "all" && !sample.tags.includes(tag)) continue;
      const card = element("div", "sample"), meta = element("div", "meta");
      for (const name of sample.tags) meta.append(element("span", "tag", name));
      if (sample.reward !== null) meta.append(element("span", "", "reward " + Number(sample.reward.toPrecision(5))));
      if (sample.length !== null) meta.append(element("span", "", sample.length + " tokens"));
      if (sample.truncated && !sample.tags.includes("truncated")) meta.append(element("span", "", "truncated"));
      meta.append(element("span", "", "sample " + sample.idx));
      card.append(meta);
      if (sample.prompt) card.append(element("pre", "prompt", sample.prompt));
      card.append(element("pre", "", sample.response));
      list.append(card);
    }
    if (!list.children.length) list.append(element("p", "muted", "No such sample in this step."));
  }
  for (const key of groups.keys()) select.append(new Option(key, key));
  select.value = Array.from(groups.keys()).pop();
  for (const name of ["all", "best", "worst", "longest", "truncated", "middle"]) {
    const button = element("button", name === tag ? "on" : "", name);
    button.addEventListener("click", function () {
      tag = name;
      for (const other of bar.children) other.className = other === button ? "on" : "";
      show();
    });
    bar.append(button, " ");
  }
  function move(by) {
    const next = select.selectedIndex + by;
    if (next >= 0 && next < select.options.length) { select.selectedIndex = next; show(); }
  }
  select.addEventListener("change", show);
  document.getElementById("prev").addEventListener("click", function () { move(-1); });
  document.getElementById("next").addEventListener("click", function () { move(1); });
  show();
})();
