// Prompts with all their answers, rewards, advantages and coloured tokens.

const SCALES = {
  lp: { of: (row, i) => (row.lp ? row.lp[i] : null), by: 100, full: 5, text: "from certain (no colour) to log-probability −5 and below", words: (v) => `log-probability ${v.toFixed(2)}, probability ${(100 * Math.exp(v)).toPrecision(3)} %` },
  ratio: { of: (row, i) => (Array.isArray(row.ratio) ? row.ratio[i] : row.ratio === 0 ? 0 : null), by: 10000, full: 0.2, text: "blue: the trainer gives more than the generator did, orange: less; full at a factor of 1.2", words: (v) => `ratio ${Math.exp(v).toFixed(4)}` },
  adv: { of: (row, i) => (row.adv ? row.adv[i] : row.a === null || (row.env || []).includes(i) ? null : 100 * row.a), by: 100, full: 2, text: "blue: made likelier, orange: made less likely; full at an advantage of 2", words: (v) => `advantage ${v.toFixed(2)}` },
};

function showSamples(steps) {
  const select = document.getElementById("sample-step"), list = document.getElementById("sample-list");
  if (!select || !steps) return;
  const color = document.getElementById("sample-color"), scale = document.getElementById("sample-scale");
  const name = (step) => (step.kind === "val" ? "validation after step " : "training step ") + step.step;
  for (const step of steps) select.append(new Option(name(step), name(step)));
  const last = steps.filter((step) => step.kind === "train").pop() || steps[steps.length - 1];
  // the newest step follows a running run, unless the reader chose another
  select.value = steps.some((step) => name(step) === memory.values.step) ? memory.values.step : name(last);
  if (memory.values.color) color.value = memory.values.color;

  function show() {
    const step = steps[select.selectedIndex], kind = SCALES[color.value];
    const known = kind && step.groups.some((group) => group.answers.some((row) => row.tokens && row.tokens.some((_, i) => kind.of(row, i) !== null)));
    scale.textContent = "";
    scale.className = "muted";
    if (kind && known) scale.append(gradient(color.value), " " + kind.text);
    else if (kind) scale.textContent = color.value === "ratio" && step.kind === "train"
      ? "no scoring pass was made: the trainer's first forward is the old policy, so every ratio begins at exactly 1"
      : "not known for these answers";
    list.replaceChildren(make("p", "muted", `${step.groups.length} of ${step.of} prompts, each with its answers; on the left the reward and, small, the advantage. All are in ${step.kind}_data_step${step.step}.jsonl.`));
    for (const group of step.groups) list.append(card(group));
  }

  function card(group) {
    const tags = make("div", "meta", ...group.tags.map((tag) => make("span", "tag", tag)));
    const rewards = group.answers.map((row) => row.r).filter((r) => r !== null);
    if (rewards.length > 1) tags.append(make("span", "", `mean reward ${short(rewards.reduce((a, b) => a + b, 0) / rewards.length)} over ${group.of > group.answers.length ? `the ${group.answers.length} extremes of ` : ""}${group.of} answers`));
    const node = make("div", "sample", tags);
    if (group.prompt) node.append(make("pre", "prompt", group.prompt));
    if (group.truth !== null) node.append(make("p", "truth", make("span", "muted", "expected "), make("code", "", group.truth)));
    const isShort = group.answers.every((row) => (row.tokens ? row.tokens.join("") : row.text || "").length <= 40);
    node.append(make("div", isShort && group.answers.length > 1 ? "answers short" : "answers", ...group.answers.map(answer)));
    return node;
  }

  function number(value) { return Math.abs(value) >= 1000 ? short(value) : String(Number(value.toPrecision(3))); }

  function answer(row) {
    const meta = make("div", "score", make("b", "", row.r === null ? "–" : number(row.r)));
    if (row.a !== null) meta.append(make("span", row.a > 0 ? "up" : row.a < 0 ? "down" : "", (row.a > 0 ? "+" : "") + number(row.a)));
    const notes = [];
    if (row.n !== null) notes.push(row.n + (row.n === 1 ? " token" : " tokens"));
    if (row.cut) notes.push("cut off");
    for (const part in row.parts || {}) notes.push(`${part} ${short(row.parts[part])}`);
    const text = make("pre", "");
    if (row.tokens) row.tokens.forEach((token, i) => {
      if (row.gap && row.gap[0] === i) text.append(make("em", "", ` … ${row.gap[1]} tokens left out … `));
      text.append(tokenNode(row, token, i));
    });
    else text.append(row.text || "");
    if (!text.textContent) text.append(make("em", "", "(empty)"));
    meta.title = "reward, and below it the advantage";
    return make("div", "answer", meta, make("div", "text", text, make("small", "muted", notes.join(" · ") + ` · row ${row.i}`)));
  }

  function tokenNode(row, token, i) {
    const foreign = (row.env || []).includes(i), node = make("span", foreign ? "env" : "token", token), kind = SCALES[color.value];
    const words = [];
    for (const scale of Object.values(SCALES)) {
      const value = scale.of(row, i);
      if (value !== null && value !== undefined) words.push(scale.words(value / scale.by));
    }
    node.title = foreign ? "not written by the policy" : words.join("\n");
    const value = kind && !foreign ? kind.of(row, i) : null;
    if (value !== null && value !== undefined) tint(node, color.value, value / kind.by / kind.full);
    return node;
  }

  function tint(node, kind, share) {
    const strength = Math.min(Math.abs(share), 1) * 55;
    if (strength < 1) return;
    const hue = kind === "lp" ? "var(--c1)" : share > 0 ? "var(--c0)" : "var(--c1)";
    node.style.background = `color-mix(in srgb, ${hue} ${strength.toFixed(0)}%, transparent)`;
  }

  function gradient(kind) {
    const bar = make("i", "gradient");
    for (let i = kind === "lp" ? 0 : -5; i <= 5; i++) {
      const part = make("b");
      tint(part, kind, i / 5);
      bar.append(part);
    }
    return bar;
  }

  function move(by) {
    const next = select.selectedIndex + by;
    if (next >= 0 && next < steps.length) { select.selectedIndex = next; choose(); }
  }
  function choose() {
    memory.values.step = select.value === name(last) ? undefined : select.value;
    show();
  }
  select.addEventListener("change", choose);
  color.addEventListener("change", () => { memory.values.color = color.value; show(); });
  document.getElementById("prev").addEventListener("click", () => move(-1));
  document.getElementById("next").addEventListener("click", () => move(1));
  show();
}
