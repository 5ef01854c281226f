// One SVG for any number of nodes: what has changed comes as a patch, and nothing else is touched.
import { SIGNS, css } from "/static/signs.js";

const NS = "http://www.w3.org/2000/svg";

function make(tag, attributes, parent) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent?.append(element);
  return element;
}

export default {
  template: `<svg class="cluster-map" role="group" tabindex="-1" preserveAspectRatio="xMidYMin meet" :aria-label="label"></svg>`,
  props: { first: Object, label: String },
  mounted() {
    this.cells = new Map();
    this.current = null;
    this.racks = make("g", {}, this.$el);
    this.nodes = make("g", {}, this.$el);
    const marker = make("marker", { id: "arc-end", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, make("defs", {}, this.$el));
    make("path", { d: "M0,0L8,4L0,8Z" }, marker);
    this.arcs = make("g", { class: "arcs", "aria-hidden": "true" }, this.$el);
    this.$el.addEventListener("click", (event) => this.pick(event.target.closest(".node")));
    this.$el.addEventListener("keydown", this.on_key);
    this.$el.addEventListener("focusin", (event) => this.make_current(event.target.closest(".node")));
    this.patch(this.first);
  },
  methods: {
    patch(change) {
      const begun = performance.now();
      if (change.frame) this.draw_frame(change.frame);
      for (const [id, cell] of Object.entries(change.cells ?? {})) this.draw_node(id, cell);
      for (const id of change.gone ?? []) {
        this.cells.get(id)?.element.remove();
        this.cells.delete(id);
      }
      if (change.frame && this.shown_arcs) this.show_arcs(...this.shown_arcs);
      if (!this.current?.isConnected) this.make_current(this.nodes.firstElementChild);
      this.$el.dataset.numChanged = Object.keys(change.cells ?? {}).length;
      this.$el.dataset.patchMs = (performance.now() - begun).toFixed(2);
      requestAnimationFrame(() => setTimeout(() => {
        this.$el.dataset.shownMs = (performance.now() - begun).toFixed(2);
        this.$el.dataset.numPatches = 1 + Number(this.$el.dataset.numPatches ?? 0);
      }));
    },
    draw_frame(frame) {
      this.side = frame.side;
      this.$el.setAttribute("viewBox", `0 0 ${frame.width} ${Math.max(frame.height, 1)}`);
      this.$el.classList.toggle("with-names", frame.side >= 44);
      this.racks.replaceChildren();
      for (const rack of frame.racks) {
        make("rect", { class: "rack", x: rack.x, y: rack.y, width: rack.width, height: rack.height, rx: 6 }, this.racks);
        make("text", { class: "rack-name", x: rack.x + 8, y: rack.y + 15 }, this.racks).textContent = rack.label;
      }
    },
    draw_node(id, cell) {
      let known = this.cells.get(id);
      if (!known) {
        const element = make("g", { role: "button", tabindex: -1, "data-node": id }, this.nodes);
        known = { element, title: make("title", {}, element), box: make("rect", { rx: 4 }, element) };
        known.sign = make("path", { "vector-effect": "non-scaling-stroke" }, element);
        known.name = make("text", { class: "node-name" }, element);
        this.cells.set(id, known);
      }
      known.x = cell.x + this.side / 2;
      known.y = cell.y + this.side / 2;
      const inner = this.side * 0.88;
      const names = this.side >= 44;
      const sign = this.side * (names ? 0.2 : 0.27);
      const picked = known.element.classList.contains("picked");
      known.element.setAttribute("class", `node look-${css(cell.look)}${picked ? " picked" : ""}`);
      known.element.setAttribute("transform", `translate(${known.x},${known.y})`);
      known.element.setAttribute("aria-label", cell.text);
      for (const [name, value] of Object.entries({ x: -inner / 2, y: -inner / 2, width: inner, height: inner })) known.box.setAttribute(name, value);
      known.sign.setAttribute("d", SIGNS[cell.look] ?? SIGNS.free);
      known.sign.setAttribute("transform", `translate(0,${names ? -this.side * 0.1 : 0}) scale(${sign})`);
      known.name.setAttribute("y", this.side * 0.34);
      known.name.setAttribute("font-size", Math.min(14, this.side * 0.24));
      known.name.textContent = names ? cell.name.slice(0, 9) : "";
      known.title.textContent = cell.text;
    },
    show_arcs(picked, arcs) {
      this.shown_arcs = [picked, arcs];
      for (const [id, cell] of this.cells) {
        cell.element.classList.toggle("picked", id === picked);
        cell.element.setAttribute("aria-pressed", String(id === picked));
      }
      this.arcs.replaceChildren();
      for (const arc of arcs) {
        const from = this.cells.get(arc.source);
        const to = this.cells.get(arc.target);
        if (!from || !to) continue;
        const bend = 0.22;
        const x = (from.x + to.x) / 2 - (to.y - from.y) * bend;
        const y = (from.y + to.y) / 2 + (to.x - from.x) * bend;
        const kind = arc.source === picked ? "keeps-mine" : "keeps-theirs";
        const whole = arc.is_whole ? "" : " incomplete";
        make("path", { class: `arc ${kind}${whole}`, d: `M${from.x},${from.y}Q${x},${y} ${to.x},${to.y}`, "marker-end": "url(#arc-end)", "data-from": arc.source, "data-to": arc.target }, this.arcs);
      }
    },
    make_current(element) {
      this.current?.setAttribute("tabindex", -1);
      this.current = element ?? this.current;
      this.current?.setAttribute("tabindex", 0);
    },
    pick(element) {
      if (element) this.$emit("pick", element.dataset.node);
    },
    on_key(event) {
      const element = event.target.closest(".node");
      if (!element) return;
      if (event.key === "Enter" || event.key === " ") {
        this.pick(element);
      } else {
        const next = this.next(element, event.key);
        if (!next) return;
        next.focus();
      }
      event.preventDefault();
    },
    next(element, key) {
      if (key === "Home") return this.nodes.firstElementChild;
      if (key === "End") return this.nodes.lastElementChild;
      const along = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
      if (!along) return null;
      // The nearest in that direction; what lies aside counts as farther away.
      const here = this.cells.get(element.dataset.node);
      let best = null;
      let least = Infinity;
      for (const cell of this.cells.values()) {
        const ahead = (cell.x - here.x) * along[0] + (cell.y - here.y) * along[1];
        const aside = Math.abs((cell.x - here.x) * along[1]) + Math.abs((cell.y - here.y) * along[0]);
        if (ahead > 1 && ahead + 3 * aside < least) [best, least] = [cell.element, ahead + 3 * aside];
      }
      return best;
    },
  },
};
