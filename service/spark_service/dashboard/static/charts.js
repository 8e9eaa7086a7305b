// Charts of tables. A figure holds the numbers as a table, which is all there is without JavaScript; this draws them.
//
//   <figure class="chart" data-chart="lines|bars" data-x="day|percent|size|number" data-y="percent|count|size|number">
//     <figcaption>What it shows</figcaption>
//     <details open><summary>As a table</summary>
//       <table>  first column: x; then one column a series
//         <thead> <th>Day</th> <th>Sessions</th> <th data-low-of="1">low</th> <th data-high-of="1">high</th>
//         <tbody> <th data-value="20422">…</th> <td data-value="12">…</td>
//
// data-value is a number: days since 1970, shares from 0 to 1, bytes. A cell without it is a gap. Columns with
// data-low-of and data-high-of are the interval of the series in that column (from 1). data-color="1".."8" on a
// heading picks a colour, data-dash draws a dashed line, data-hide leaves a column out of the chart, data-span draws
// the line over gaps, data-points its points large.
"use strict";
(() => {
  const DAY_SECONDS = 86400;
  const HEIGHT = 260;
  const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

  const colour = (figure, name) => {
    // The computed colour of an element: a custom property alone would give back its text.
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    figure.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const faded = (rgb, share) => rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);

  const size = (bytes) => {
    let value = bytes;
    let unit = 0;
    while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
      value /= 1000;
      unit += 1;
    }
    return `${value.toFixed(unit === 0 || Math.abs(value) >= 99.95 ? 0 : 1)} ${UNITS[unit]}`;
  };
  const short = (value) => {
    let scaled = value;
    let unit = 0;
    while (Math.abs(scaled) >= 999.5 && unit < 4) {
      scaled /= 1000;
      unit += 1;
    }
    return `${Number(scaled.toPrecision(3))} ${["", "k", "M", "G", "T"][unit]}`.trimEnd();
  };
  const ofDay = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
  const WORDS = {
    percent: (value) => `${(100 * value).toFixed(1).replace(/\.0$/, "")}%`,
    count: short,
    number: short,
    size,
    day: (seconds) => new Date(1000 * seconds).toISOString().slice(0, 10),
  };

  const read = (table, xKind) => {
    const columns = [...table.tHead.rows[0].cells].map((cell) => ({
      label: cell.textContent.trim(),
      lowOf: Number(cell.dataset.lowOf ?? 0),
      highOf: Number(cell.dataset.highOf ?? 0),
      colour: Number(cell.dataset.color ?? 0),
      dash: "dash" in cell.dataset,
      hide: "hide" in cell.dataset,
      span: "span" in cell.dataset,
      points: "points" in cell.dataset,
      values: [],
    }));
    for (const row of table.tBodies[0].rows) {
      columns.forEach((column, index) => {
        const text = row.cells[index]?.dataset.value;
        column.values.push(text === undefined || text === "" ? null : Number(text));
      });
    }
    if (xKind === "day") columns[0].values = columns[0].values.map((day) => day * DAY_SECONDS);
    // uPlot wants x to rise.
    const order = columns[0].values.map((_, index) => index).sort((a, b) => columns[0].values[a] - columns[0].values[b]);
    for (const column of columns) column.values = order.map((index) => column.values[index]);
    return columns;
  };

  const draw = (figure) => {
    const table = figure.querySelector("table:not(.u-legend)"); // not the legend of a chart that was drawn before
    if (!table || !table.tBodies[0]?.rows.length || typeof uPlot === "undefined") return;
    figure.sparkChart?.destroy();
    figure.querySelector(".chart-area")?.remove();
    const { chart: kind, x: xKind = "number", y: yKind = "number" } = figure.dataset;
    const columns = read(table, xKind);
    const ink = colour(figure, "--muted");
    const grid = colour(figure, "--line");
    const shown = columns.filter((column, index) => index > 0 && !column.hide);
    const data = [columns[0].values, ...shown.map((column) => column.values)];
    const place = (number) => shown.indexOf(columns[number]) + 1;
    const bands = [];
    let next = 0;
    const series = shown.map((column) => {
      const of = column.lowOf || column.highOf;
      if (of) return { show: true, label: column.label, width: 0, points: { show: false }, stroke: "transparent", legend: false };
      next += 1;
      const stroke = colour(figure, `--series-${column.colour || next}`);
      column.stroke = stroke;
      return {
        label: column.label,
        stroke,
        width: 2,
        spanGaps: column.span,
        dash: column.dash ? [6, 4] : undefined,
        fill: kind === "bars" ? faded(stroke, 0.55) : undefined,
        paths: kind === "bars" ? uPlot.paths.bars({ size: [0.7, 40], align: 0 }) : undefined,
        points: { show: kind === "bars" ? false : columns[0].values.length < 40, size: column.points ? 11 : 5, fill: stroke },
        value: (_, value) => (value === null ? "–" : WORDS[yKind](value)),
      };
    });
    columns.forEach((column, index) => {
      if (!column.highOf) return;
      const low = columns.findIndex((other) => other.lowOf === column.highOf);
      if (low > 0) bands.push({ series: [place(index), place(low)], fill: faded(columns[column.highOf].stroke, 0.15) });
    });
    const area = document.createElement("div");
    area.className = "chart-area";
    area.setAttribute("role", "img");
    area.setAttribute("aria-label", `Chart: ${figure.querySelector("figcaption").textContent.trim()}. The table below has its numbers.`);
    figure.insertBefore(area, figure.querySelector("figcaption").nextSibling);
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const x = columns[0].values;
    const margin = x.length > 1 ? 0 : xKind === "day" ? 3 * DAY_SECONDS : 1;
    const half = kind === "bars" && x.length > 1 ? (x[x.length - 1] - x[0]) / (x.length - 1) / 2 : 0;
    figure.sparkChart = new uPlot(
      {
        width: Math.max(area.clientWidth, 200),
        height: Number(figure.dataset.height ?? HEIGHT),
        tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "UTC"),
        scales: {
          x: { time: xKind === "day", range: [x[0] - margin - half, x[x.length - 1] + margin + half] },
          y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.06 : 1] },
        },
        series: [{ label: columns[0].label, value: (_, value) => (value === null ? "–" : WORDS[xKind](value)) }, ...series],
        bands,
        axes: [
          {
            ...axis,
            space: 64,
            values: (_, ticks) => ticks.map(xKind === "day" ? (seconds) => ofDay.format(1000 * seconds) : WORDS[xKind]),
            incrs: xKind === "day" ? [1, 2, 7, 14, 30, 91, 365].map((days) => days * DAY_SECONDS) : undefined,
          },
          { ...axis, values: (_, ticks) => ticks.map(WORDS[yKind]), size: 60 },
        ],
        cursor: { drag: { x: false, y: false }, y: false },
        legend: { live: true },
      },
      data,
      area,
    );
    const rows = area.querySelectorAll(".u-legend tr");
    shown.forEach((column, index) => {
      if (column.lowOf || column.highOf) rows[index + 1]?.remove();
    });
    const details = figure.querySelector("details");
    if (details && !("drawn" in figure.dataset)) details.open = false;
    figure.dataset.drawn = "";
  };

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const area = target.querySelector(".chart-area");
      if (!area || !target.sparkChart || area.clientWidth === target.sparkChart.width) continue;
      target.sparkChart.setSize({ width: Math.max(area.clientWidth, 200), height: target.sparkChart.height });
    }
  });
  const all = (root) => root.querySelectorAll("figure[data-chart]");
  document.addEventListener("spark:content", ({ detail: root }) => {
    for (const figure of all(root)) {
      draw(figure);
      sizes.observe(figure);
    }
  });
  document.addEventListener("spark:theme", () => all(document).forEach(draw));
})();
