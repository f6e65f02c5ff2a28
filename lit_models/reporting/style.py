"""How a report looks, and what it does under a pointer; without script all of it is readable."""

STYLE = """
:root { color-scheme: light dark; --paper: #fbfbf9; --sheet: #fff; --ink: #1b1f24; --soft: #59616b;
  --line: #e3e5e1; --rule: #ecedea; --good: #146c43; --bad: #b3261e; --warn: #8a5300;
  --c1: #0a5fa8; --c2: #b8500c; --c3: #0b7a5f; --c4: #8b3f96; --again: #b8500c1f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #131517; --sheet: #1a1d20; --ink: #e8eaec; --soft: #a2abb4; --line: #30353a;
    --rule: #272b2f; --good: #6fcf9b; --bad: #ff8a80; --warn: #f0b860; --c1: #70b7f5; --c2: #f3a15f;
    --c3: #52cba4; --c4: #d9a0e2; --again: #f3a15f26; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 2.5rem 1.5rem 4rem; background: var(--paper);
  color: var(--ink); font: 0.9375rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
h1, h2, h3, p, ul, dl, dd, figure, table { margin: 0; padding: 0; }
h1 { font-size: 1.75rem; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; }
h2 { font-size: 1.0625rem; font-weight: 650; margin-bottom: 0.75rem; }
h3 { font-size: 0.9375rem; font-weight: 600; }
p + p, p + .scroll, dl + p, ul + p, .scroll + p, p + dl { margin-top: 0.6rem; }
.eyebrow { color: var(--soft); font-size: 0.8125rem; margin-bottom: 0.35rem; }
.lead { font-size: 1.0625rem; max-width: 46rem; margin-top: 0.6rem; }
.note, .soft { color: var(--soft); font-size: 0.8125rem; line-height: 1.45; }
.lede { margin: -0.4rem 0 1.5rem; max-width: 46rem; }
.runs { margin-top: 1rem; } .runs p + p { margin-top: 0.2rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.state { font-weight: 600; }
header { padding-bottom: 1.75rem; border-bottom: 1px solid var(--line); margin-bottom: 2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: 1.1rem 1.5rem; margin-top: 1.5rem; }
.tiles dt { color: var(--soft); font-size: 0.8125rem; margin: 0; }
.tiles dd { font-size: 1.25rem; font-weight: 600; line-height: 1.3; }
.tiles small { display: block; font-size: 0.8125rem; font-weight: 400; color: var(--soft); }
main { display: grid; grid-template-columns: minmax(0, 1fr); gap: 2.25rem 3rem; }
.charts { display: grid; grid-template-columns: minmax(0, 1fr); gap: 2rem 3rem; }
section { min-width: 0; }
@media (min-width: 60rem) {
  main, .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .wide { grid-column: 1 / -1; }
}
figure { min-width: 0; display: flex; flex-direction: column; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.1rem; font-size: 0.8125rem;
  color: var(--soft); margin: 0.15rem 0 0.5rem; }
.legend b { color: var(--ink); font-weight: 600; }
.key { display: inline-block; width: 1.35rem; border-top: 2px solid; margin-right: 0.4rem;
  vertical-align: 0.25em; color: var(--c1); }
.key.c2 { color: var(--c2); border-top-style: dashed; }
.key.c3 { color: var(--c3); border-top-style: dotted; border-top-width: 3px; }
.key.c4 { color: var(--c4); border-top-style: double; border-top-width: 3px; }
.plot { position: relative; height: 13.5rem; margin: auto 0.75rem 1.6rem 3.4rem; }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible;
  border-bottom: 1px solid var(--soft); }
.plot path { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--rule); }
.curve { stroke: var(--c1); stroke-width: 1.6; stroke-linejoin: round; }
.curve.c2 { stroke: var(--c2); stroke-dasharray: 6 3; }
.curve.c3 { stroke: var(--c3); stroke-dasharray: 2 3; }
.curve.c4 { stroke: var(--c4); stroke-dasharray: 9 3 2 3; }
.curve.faint { stroke-width: 1; opacity: 0.34; stroke-dasharray: none; }
.curve.trend { stroke-width: 2; }
.curve.points { stroke-width: 5.5; stroke-linecap: round; stroke-dasharray: none; }
.gap { stroke: var(--bad); stroke-width: 2; }
.cut { stroke: var(--soft); stroke-dasharray: 4 3; }
.again { fill: var(--again); }
.ys span, .xs span, .mark { position: absolute; font-size: 0.75rem; line-height: 1;
  color: var(--soft); white-space: nowrap; }
.ys { position: absolute; inset: 0 auto 0 -0.5rem; }
.ys span { right: 0; transform: translateY(-50%); }
.xs { position: absolute; inset: auto 0 -0.45rem 0; }
.xs span { transform: translateX(-50%); }
.mark { left: calc(var(--x) * 100%); top: -0.1rem; padding: 0 0.25rem; background: var(--paper); }
.at { position: absolute; right: 0; top: 0; font-size: 0.75rem; padding: 0.1rem 0.45rem;
  background: var(--sheet); border: 1px solid var(--line); border-radius: 3px; color: var(--ink);
  pointer-events: none; max-width: 100%; }
.at:empty { display: none; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 0.8125rem;
  vertical-align: bottom; }
th, td { padding: 0.35rem 1rem 0.35rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; overflow-wrap: normal; }
th:last-child, td:last-child { padding-right: 0; }
thead th { border-bottom-color: var(--line); }
td:nth-child(2):not(.number) { min-width: 5.5rem; }
.number { text-align: right; white-space: nowrap; }
td.long { min-width: 15rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(6.5rem, max-content) minmax(0, 1fr);
  gap: 0.3rem 1.25rem; font-size: 0.875rem; }
dl.tiles { font-size: inherit; }
dt { color: var(--soft); }
pre { margin: 0; padding: 0.75rem 0.9rem; background: var(--sheet); border: 1px solid var(--line);
  border-radius: 4px; white-space: pre-wrap; font: 0.8125rem/1.5 ui-monospace, SFMono-Regular,
  Menlo, Consolas, monospace; max-height: 26rem; overflow-y: auto; }
code { font: 0.9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin-top: 0.75rem; }
summary { cursor: pointer; font-weight: 600; font-size: 0.875rem; padding: 0.2rem 0; }
details > :nth-child(2) { margin-top: 0.6rem; }
.samples { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1.25rem; }
.samples h3 { margin-bottom: 0.4rem; }
.list { padding-left: 1.1rem; } .list li { margin-bottom: 0.35rem; }
.split { display: flex; height: 1.75rem; border-radius: 4px; overflow: hidden; gap: 2px; }
.split i { min-width: 2px; }
.split i, .swatch { background: var(--fill); }
.swatch { display: inline-block; width: 0.75rem; height: 0.75rem; border-radius: 2px;
  margin-right: 0.5rem; }
.s0 { --fill: var(--c1); } .s1 { --fill: var(--c2); } .s2 { --fill: var(--c3); }
.s3 { --fill: var(--c4); } .s4 { --fill: color-mix(in srgb, var(--c1) 55%, var(--paper)); }
.s5 { --fill: color-mix(in srgb, var(--c2) 55%, var(--paper)); }
.s6 { --fill: color-mix(in srgb, var(--c3) 55%, var(--paper)); }
.s7 { --fill: color-mix(in srgb, var(--c4) 55%, var(--paper)); }
.s8 { --fill: color-mix(in srgb, var(--soft) 60%, var(--paper)); }
.split + .scroll { margin-top: 0.75rem; }
@media print {
  :root { color-scheme: light; --paper: #fff; }
  body { padding: 0; font-size: 10pt; max-width: none; }
  figure, tr, .tiles { break-inside: avoid; } h2, h3 { break-after: avoid; }
  pre { max-height: none; } .at { display: none; } .scroll { overflow: visible; }
}
"""

SCRIPT = """
document.querySelectorAll(".plot").forEach(plot => {
  const [x0, x1] = plot.dataset.x.split(" ").map(Number), y = plot.dataset.y.split(" ");
  const [y0, y1] = y.map(Number), svg = plot.querySelector("svg"), at = plot.querySelector(".at");
  const up = s => y[2] ? y0 * (y1 / y0) ** s : y0 + s * (y1 - y0);
  const curves = [...plot.querySelectorAll(".curve[data-name]")].map(curve => [curve.dataset.name,
    [...curve.getAttribute("d").matchAll(/[ML](\\S+?) ([\\d.-]+)/g)].map(m => [+m[1], +m[2]])]);
  plot.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = 1000 * (event.clientX - box.left) / box.width;
    at.textContent = curves.filter(c => c[1].length).map(([name, points]) => {
      const p = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return `${name} ${up(1 - p[1] / 1000).toPrecision(4)} at ${
        Math.round(x0 + p[0] / 1000 * (x1 - x0))}`;
    }).join(" · ");
  });
  plot.addEventListener("pointerleave", () => { at.textContent = ""; });
});
"""
