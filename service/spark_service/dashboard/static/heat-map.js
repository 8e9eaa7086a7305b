// The heat map of a profile: layers down, experts across, one pixel an expert, stretched by the browser. The table of
// layers beneath it is all there is without JavaScript; a click here follows the link of that table's row.
"use strict";
(() => {
  const ROW_PIXELS = { least: 6, most: 22, all: 420 };

  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  const read = (map) => {
    const levels = bytes(map.levels);
    const bits = bytes(map.resident);
    const octaves = (map.high_log2 - map.low_log2) / 254;
    let start = 0;
    const layers = map.blocks.map((block, index) => {
      const size = map.n_experts[index];
      const of = { block, size, levels: levels.subarray(start, start + size), resident: new Uint8Array(size) };
      for (let expert = 0; expert < size; expert += 1) {
        const at = start + expert;
        of.resident[expert] = (bits[at >> 3] >> (7 - (at & 7))) & 1;
      }
      of.byId = Uint32Array.from({ length: size }, (_, expert) => expert);
      // Hottest first: what is resident before what is not, as two that look alike may lie on either side.
      of.sorted = Uint32Array.from(of.byId).sort(
        (a, b) => of.levels[b] - of.levels[a] || of.resident[b] - of.resident[a] || a - b,
      );
      start += size;
      return of;
    });
    return { layers, residency: map.residency, timesEven: (level) => 2 ** (map.low_log2 + (level - 1) * octaves) };
  };

  const colourOf = (figure, name) => {
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    figure.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    const canvas = new OffscreenCanvas(1, 1);
    const context = canvas.getContext("2d");
    context.fillStyle = found;
    context.fillRect(0, 0, 1, 1);
    return context.getImageData(0, 0, 1, 1).data;
  };

  class HeatMap {
    constructor(figure, map) {
      Object.assign(this, read(map));
      this.figure = figure;
      this.canvas = figure.querySelector("[data-heat-canvas]");
      this.cursor = figure.querySelector(".heat-cursor");
      this.note = figure.querySelector("[data-heat-note]");
      this.sorted = figure.querySelector("[data-heat-sorted]");
      this.columns = Math.max(...this.layers.map((layer) => layer.size));
      this.at = { row: 0, column: 0 };
      this.canvas.width = this.columns;
      this.canvas.height = this.layers.length;
      const height = ROW_PIXELS.all / this.layers.length;
      this.canvas.style.height = `${this.layers.length * Math.min(Math.max(height, ROW_PIXELS.least), ROW_PIXELS.most)}px`;
      for (const part of figure.querySelectorAll(".heat-tools, .heat-area, [data-heat-note]")) part.hidden = false;
      figure.querySelector("[data-heat-layers]").open = false;
      this.listen();
      this.draw();
      this.say("Move over the picture, or focus it and use the arrow keys.");
      figure.dataset.drawn = "";
    }

    listen() {
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerleave", () => this.mark(false));
      this.canvas.addEventListener("click", (event) => {
        this.point(event);
        this.open();
      });
      this.canvas.addEventListener("focus", () => this.show());
      this.canvas.addEventListener("blur", () => this.mark(false));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.sorted.addEventListener("change", () => this.draw());
      document.addEventListener("spark:theme", () => this.draw());
    }

    draw() {
      const [page, hot, cold] = ["--card", "--heat-hot", "--heat-cold"].map((name) => colourOf(this.figure, name));
      const context = this.canvas.getContext("2d");
      const image = context.createImageData(this.columns, this.layers.length);
      const mix = (to, share, at) => {
        for (let part = 0; part < 3; part += 1) image.data[at + part] = page[part] + (to[part] - page[part]) * share;
        image.data[at + 3] = 255;
      };
      this.layers.forEach((layer, row) => {
        const order = this.order(layer);
        for (let column = 0; column < layer.size; column += 1) {
          const expert = order[column];
          const share = 0.08 + 0.92 * (layer.levels[expert] / 255) ** 1.6;
          mix(layer.resident[expert] ? hot : cold, share, 4 * (row * this.columns + column));
        }
      });
      context.putImageData(image, 0, 0);
      const key = this.figure.querySelector("[data-heat-key]").getContext("2d");
      const scale = key.createImageData(64, 2);
      for (let x = 0; x < 64; x += 1) {
        [hot, cold].forEach((to, row) => {
          const share = 0.08 + 0.92 * (x / 63) ** 1.6;
          for (let part = 0; part < 3; part += 1) scale.data[4 * (64 * row + x) + part] = page[part] + (to[part] - page[part]) * share;
          scale.data[4 * (64 * row + x) + 3] = 255;
        });
      }
      key.putImageData(scale, 0, 0);
    }

    order(layer) {
      return this.sorted.checked ? layer.sorted : layer.byId;
    }

    point(event) {
      const box = this.canvas.getBoundingClientRect();
      const row = Math.floor(((event.clientY - box.top) / box.height) * this.layers.length);
      const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
      this.move(row, column);
    }

    move(row, column) {
      this.at.row = Math.min(Math.max(row, 0), this.layers.length - 1);
      this.at.column = Math.min(Math.max(column, 0), this.layers[this.at.row].size - 1);
      this.show();
    }

    key(event) {
      const { row, column } = this.at;
      const page = Math.max(1, Math.round(this.columns / 10));
      const moves = {
        ArrowLeft: [row, column - 1],
        ArrowRight: [row, column + 1],
        ArrowUp: [row - 1, column],
        ArrowDown: [row + 1, column],
        Home: [row, 0],
        End: [row, this.columns - 1],
        PageUp: [row, column - page],
        PageDown: [row, column + page],
      };
      if (event.key === "Enter" || event.key === " ") this.open();
      else if (moves[event.key]) this.move(...moves[event.key]);
      else return;
      event.preventDefault();
    }

    show() {
      const layer = this.layers[this.at.row];
      const expert = this.order(layer)[this.at.column];
      const level = layer.levels[expert];
      const times = this.timesEven(level);
      const share = (100 * times) / layer.size;
      const told = level
        ? `about ${share.toPrecision(2)}% of its selections, ${times >= 9.95 ? times.toFixed(0) : times.toPrecision(2)} times the even share`
        : "almost never selected";
      const tier = layer.resident[expert] ? "video" : "host";
      this.say(`Block ${layer.block}, expert ${expert}: ${told}; in ${tier} memory at ${Math.round(100 * this.residency)}%.`);
      this.mark(true);
    }

    mark(on) {
      this.cursor.hidden = !on;
      const width = this.canvas.clientWidth / this.columns;
      const height = this.canvas.clientHeight / this.layers.length;
      this.cursor.style.left = `${this.at.column * width}px`;
      this.cursor.style.top = `${this.at.row * height}px`;
      this.cursor.style.width = `${Math.max(width, 3)}px`;
      this.cursor.style.height = `${height}px`;
    }

    say(text) {
      this.note.textContent = text;
    }

    open() {
      const { block } = this.layers[this.at.row];
      this.figure.querySelector(`[data-heat-layer="${block}"]`)?.click();
    }
  }

  const start = async (figure) => {
    const answer = await fetch(figure.dataset.heat, { headers: { Accept: "application/json" } });
    // Without it the table stays as it is.
    if (answer.ok) figure.sparkHeatMap = new HeatMap(figure, await answer.json());
  };

  document.addEventListener("DOMContentLoaded", () => {
    for (const figure of document.querySelectorAll("figure[data-heat]")) start(figure);
  });
  // What was swapped in below the picture: go there.
  document.addEventListener("htmx:after:swap", () => {
    const layer = document.querySelector("#layer h2");
    if (!layer) return;
    layer.focus({ preventScroll: true });
    layer.scrollIntoView({ block: "nearest" });
  });
})();
