// Shows the value under a pointer, a finger or the arrow keys; on a page that is served, takes parts that have changed.
"use strict";
(() => {
  const tip = document.getElementById("tip");

  // ---- values ----

  const digits = (v) => (Math.abs(v) >= 1e-3 || v === 0 ? Number(v.toPrecision(4)).toLocaleString("en") : v.toExponential(2));
  const big = (v) => {
    for (const [unit, word] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]]) if (Math.abs(v) >= unit) return (v / unit).toPrecision(4) + " " + word;
    return digits(v);
  };
  const FORMS = {
    number: big,
    share: (v) => (100 * v).toPrecision(3) + " %",
    seconds: (v) => (v < 1 ? (1e3 * v).toPrecision(3) + " ms" : v.toPrecision(4) + " s"),
  };

  // The numbers of a path are its points; a closed area ends in V, after which there are none.
  const points = (path) => (path.points ??= [...path.getAttribute("d").split("V")[0].matchAll(/(-?[\d.]+(?:e[-+]?\d+)?) (-?[\d.]+(?:e[-+]?\d+)?)/g)].map((m) => [+m[1], +m[2]]));

  const nearest = (own, x) => {
    let low = 0, high = own.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; own[middle][0] < x ? (low = middle) : (high = middle); }
    return Math.abs(own[low][0] - x) <= Math.abs(own[high][0] - x) ? own[low] : own[high];
  };

  const atCurve = (plot, share) => {
    const box = plot.querySelector(".data").viewBox.baseVal;
    const x = box.x + share * box.width;
    const curves = [...plot.querySelectorAll("path[data-label]")].filter((path) => points(path).length);
    const found = curves.map((path) => nearest(points(path), x));
    if (!found.length) return null;
    const place = found.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a))[0];
    const form = FORMS[plot.dataset.form] ?? big;
    const lines = curves.map((path, i) => {
      // Curves that lie far away have no value here.
      if (Math.abs(found[i][0] - x) > 0.2 * box.width) return null;
      let value = found[i][1];
      const isLowest = plot.dataset.log === "1" && value <= -box.y - box.height;
      if (plot.dataset.log === "1") value = 10 ** value;
      if (plot.dataset.stacked === "1" && i + 1 < curves.length) value -= found[i + 1][1];
      value *= +(plot.dataset.scale ?? 1);
      return (path.dataset.label ? path.dataset.label + ": " : "") + (isLowest ? "at most " : "") + form(value);
    });
    const name = plot.dataset.x.split(" ")[0];
    const at = JSON.parse(plot.dataset.names ?? "[]")[place] ?? big(plot.dataset.logx === "1" ? 10 ** place : place);
    return { share: (place - box.x) / box.width, text: [name + " " + at, ...lines.filter(Boolean)].join("\n") };
  };

  const atCell = (plot, share, height) => {
    const [columns, rows] = plot.dataset.size.split(",").map(Number);
    const [first, last] = plot.dataset.steps.split(",").map(Number);
    const column = Math.min(Math.floor(share * columns), columns - 1), row = Math.min(Math.max(Math.floor(height * rows), 0), rows - 1);
    const value = plot.dataset.cells.split(",")[row * columns + column];
    const step = Math.round(first + ((last - first) * (column + 0.5)) / columns);
    return value === "" ? null : { share, text: `${JSON.parse(plot.dataset.names)[row]}\nnear step ${digits(step)}: ${(value / 100).toFixed(2)} times the median` };
  };

  const boxes = (path) => (path.boxes ??= [...path.getAttribute("d").matchAll(/M([^ ]+) ([^h]+)h([^v]+)v([^h]+)/g)].map((m) => m.slice(1).map(Number)));

  const atBox = (plot, share, height) => {
    const box = plot.querySelector(".data").viewBox.baseVal;
    const x = share * box.width, y = height * box.height;
    for (const path of plot.querySelectorAll(".box")) {
      const at = boxes(path).findIndex(([left, top, width, tall]) => x >= left && x <= left + width && y >= top && y <= top + tall);
      if (at < 0) continue;
      const [left, , width] = boxes(path)[at], microbatch = path.dataset.microbatches.split(",")[at];
      return { share, text: `${path.dataset.label}${microbatch === "" ? "" : ", micro batch " + microbatch}\n${width.toPrecision(3)} ms, from ${left.toPrecision(4)} ms` };
    }
    return null;
  };

  // ---- pointing ----

  const hide = () => {
    tip.hidden = true;
    document.querySelectorAll(".cross").forEach((line) => line.remove());
  };

  const cross = (plot, share) => {
    const line = document.createElementNS(plot.namespaceURI, "line");
    line.setAttribute("class", "cross");
    line.setAttribute("x1", 100 * share + "%");
    line.setAttribute("x2", 100 * share + "%");
    const inner = plot.querySelector(".data");
    line.setAttribute("y1", inner.getAttribute("y"));
    line.setAttribute("y2", +inner.getAttribute("y") + +inner.getAttribute("height"));
    plot.append(line);
  };

  const say = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const own = tip.getBoundingClientRect();
    const left = x + 14 + own.width > innerWidth ? x - 14 - own.width : x + 14;
    tip.style.transform = `translate(${Math.max(4, Math.min(left, innerWidth - own.width - 4))}px, ${Math.max(4, y - own.height - 10)}px)`;
  };

  const show = (plot, share, pageX, pageY) => {
    hide();
    const inner = plot.querySelector(".data");
    if (!inner || share < 0 || share > 1) return;
    const area = plot.getBoundingClientRect();
    const height = (pageY - area.top - +inner.getAttribute("y")) / +inner.getAttribute("height");
    const at = { map: atCell, boxes: atBox }[plot.dataset.form] ?? atCurve;
    const found = at(plot, share, height);
    if (!found) return;
    const kind = plot.dataset.x;
    // The same place in all charts of the same x.
    const others = kind ? document.querySelectorAll(`.plot[data-x="${CSS.escape(kind)}"]`) : [plot];
    const base = inner.viewBox.baseVal, x = base.x + found.share * base.width;
    for (const other of others) {
      const box = other.querySelector(".data").viewBox.baseVal;
      const place = other === plot ? found.share : (x - box.x) / box.width;
      if (place >= 0 && place <= 1) cross(other, place);
    }
    plot.place = found.share;
    say(found.text, pageX, pageY);
  };

  addEventListener("pointermove", point);
  addEventListener("pointerdown", point);
  function point(event) {
    const named = event.target.closest?.("[data-text], [data-from]");
    const plot = event.target.closest?.(".plot");
    if (named) { hide(); say(named.dataset.text ?? document.getElementById(named.dataset.from)?.textContent ?? "", event.clientX, event.clientY); }
    else if (plot) { const area = plot.getBoundingClientRect(); show(plot, (event.clientX - area.left) / area.width, event.clientX, event.clientY); }
    else hide();
  }
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => {
    const plot = document.activeElement?.closest?.(".plot");
    if (event.key === "Escape") hide();
    if (!plot || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const area = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (plot.place ?? 0.5) + (event.key === "ArrowLeft" ? -0.01 : 0.01)));
    show(plot, share, area.left + share * area.width, area.top + area.height / 2);
    plot.place = share;
  });

  // ---- searching answers ----

  // A row must have each word, and be within each bound of a column, as in reward<0.5.
  const find = (field) => {
    const asked = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const tables = [...field.closest("section").querySelectorAll(".rollouts")];
    let found = 0, all = 0;
    for (const table of tables) {
      const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.toLowerCase());
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !asked.every((word) => {
          const [, name, sign, bound] = word.match(/^(.+?)([<>])(-?[\d.]+)$/) ?? [];
          const at = names.indexOf(name);
          if (at < 0) return text.includes(word);
          const value = row.cells[at].textContent.replaceAll(",", "");
          return value !== "" && (sign === "<" ? +value < +bound : +value > +bound);
        });
        all += 1; found += !row.hidden;
      }
    }
    if (asked.length) tables.forEach((table) => table.closest("details")?.setAttribute("open", ""));
    field.parentElement.querySelector(".found").textContent = asked.length ? `${found} of ${all}` : "";
  };
  addEventListener("input", (event) => { if (event.target.matches?.(".find")) find(event.target); });

  // ---- a page that is served ----

  const source = document.body.dataset.events;
  if (!source) return;
  const status = document.getElementById("live");
  const stream = new EventSource(source);
  stream.onopen = () => { status.textContent = "live"; };
  stream.onerror = () => { status.textContent = "not connected: the command has ended, or the network is down"; };
  stream.onmessage = (event) => {
    const { id, html } = JSON.parse(event.data);
    const part = document.getElementById(id);
    if (!part) return;
    const open = [...part.querySelectorAll("details[open]")].map((own) => own.id);
    const before = part.querySelector(".find"), isTyped = before && before === document.activeElement;
    part.innerHTML = html;
    for (const own of open) document.getElementById(own)?.setAttribute("open", "");
    const field = part.querySelector(".find");
    if (field && before?.value) { field.value = before.value; find(field); }
    if (field && isTyped) field.focus();
    hide();
  };
})();
