// Shows the tensors of a step as a table that folds, searches and sorts; lets the reader choose the step; completes links.
// All texts come from the page's data, with invisible characters made visible, and enter the page as text only.
"use strict";

const MOST_ROWS = 1000; // of a table, before the reader asks for more
const OPEN_ROWS = 30; // parts with changes are opened until the table has this many rows
const MOST_INNER = 100; // parts and tensors of a part that is opened because it comes first
const $ = (id) => document.getElementById(id);

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

function sizeText(n) {
  for (const unit of ["B", "KB", "MB", "GB", "TB"]) {
    if (n < 1000 || unit === "TB") return (unit === "B" ? String(n) : n.toFixed(1)) + " " + unit;
    n /= 1000;
  }
}

async function readFacts() {
  const packed = Uint8Array.from(atob($("facts").value), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = new Uint8Array(await new Response(stream).arrayBuffer());
  const end = data.indexOf(10); // JSON up to the line break, then a bit for each tensor and step
  return { ...JSON.parse(new TextDecoder().decode(data.subarray(0, end))), bits: data.subarray(end + 1) };
}

// --- what a step says of its tensors

const KINDS = ["new", "part", "shared"]; // in the order of a sort by change

function statesOf(facts, at) {
  if (facts.state) return facts.state.map((number) => facts.states[number]);
  const width = Math.ceil(facts.names.length / 8);
  const isChanged = (tensor, step) =>
    (facts.bits[(step - facts.from) * width + (tensor >> 3)] >> (7 - (tensor & 7))) & 1;
  return facts.names.map((_, tensor) => {
    if (at < facts.first[tensor]) return null;
    if (at === facts.first[tensor]) return ["new", "new"];
    if (at < facts.from) return ["shared", "not known"];
    if (isChanged(tensor, at)) return ["part", "changed"];
    for (let step = at - 1; step >= facts.from && step >= facts.first[tensor]; step--)
      if (step === facts.first[tensor] || isChanged(tensor, step))
        return ["shared", "shared since step " + facts.steps[step].step];
    return ["shared", "shared since before step " + facts.steps[facts.from].step];
  });
}

function valuesOf(facts, at) {
  return facts.values && at === facts.valuesAt ? facts.values : {};
}

// --- the tree

class Node {
  constructor(label, depth) {
    Object.assign(this, { label, depth, inner: new Map(), tensors: [], isOpen: false });
  }
  children() {
    return [...this.inner.values(), ...this.tensors];
  }
}

function treeOf(facts, states, values, isShown) {
  const root = new Node("", 0);
  facts.names.forEach((name, number) => {
    if (!states[number] || !isShown(name)) return;
    const parts = name.split(".");
    let node = root;
    for (const part of parts.slice(0, -1).slice(0, 32)) {
      if (!node.inner.has(part)) node.inner.set(part, new Node(part, node.depth + 1));
      node = node.inner.get(part);
    }
    const [kind, words] = states[number];
    const label = parts.slice(Math.min(parts.length - 1, 32)).join(".");
    node.tensors.push({
      label, name, number, kind, words, n: 1, order: number, depth: node.depth + 1, bytes: facts.bytes[number],
      nChanged: kind === "shared" ? 0 : 1, changedBytes: kind === "shared" ? 0 : facts.bytes[number],
      value: values[number], most: values[number] ? values[number][0] : -1,
    });
  });
  return summed(folded(root));
}

function folded(node) {
  // A part with one part or tensor in it is one row with both names.
  for (const [key, child] of node.inner) {
    const made = folded(child);
    if (made.inner) {
      node.inner.set(key, made);
    } else {
      node.inner.delete(key);
      node.tensors.push(made);
    }
  }
  if (!node.depth || node.children().length !== 1) return node;
  const [only] = node.children();
  only.label = node.label + "." + only.label;
  return only;
}

function summed(node, depth = 0) {
  node.depth = depth;
  Object.assign(node, { n: 0, bytes: 0, nChanged: 0, changedBytes: 0, most: -1, order: Infinity });
  for (const tensor of node.tensors) tensor.depth = depth + 1;
  for (const child of node.inner.values()) summed(child, depth + 1);
  for (const child of node.children()) {
    for (const figure of ["n", "bytes", "nChanged", "changedBytes"]) node[figure] += child[figure];
    node.most = Math.max(node.most, child.most);
    node.order = Math.min(node.order, child.order);
  }
  return node;
}

const natural = new Intl.Collator("en", { numeric: true }).compare;
const SORTS = {
  name: (a, b) => natural(a.label, b.label),
  size: (a, b) => b.bytes - a.bytes,
  // The bytes between a file's tensors come last: they change with any tensor.
  change: (a, b) => (a.label === "") - (b.label === "") || (b.nChanged > 0) - (a.nChanged > 0) ||
    b.changedBytes - a.changedBytes || rank(a) - rank(b),
  amount: (a, b) => b.most - a.most,
};
const rank = (node) => (node.kind ? KINDS.indexOf(node.kind) : 0);

function sortedChildren(node, sort) {
  const order = (a, b) => sort.sign * SORTS[sort.by](a, b) || a.order - b.order;
  return node.children().sort(order);
}

function visibleRows(root, sort, isAllOpen) {
  const rows = [];
  const visit = (node) => {
    for (const child of sortedChildren(node, sort)) {
      rows.push(child);
      if (child.inner && (isAllOpen || child.isOpen)) visit(child);
    }
  };
  visit(root);
  return rows;
}

function openChanged(root) {
  let n = root.children().length;
  let level = [root];
  while (level.length) {
    const next = level.flatMap((node) => [...node.inner.values()].filter((child) => child.nChanged));
    for (const node of next.sort(SORTS.change)) {
      n += node.children().length;
      if (n > OPEN_ROWS) return openFirst(root);
      node.isOpen = true;
    }
    level = next;
  }
}

function openFirst(root) {
  // However many parts there are, the first one shows which of its tensors changed.
  const mostChanged = (node) => [...node.inner.values()].filter((child) => child.nChanged).sort(SORTS.change)[0];
  let part = mostChanged(root);
  while (part && part.children().length <= MOST_INNER) {
    part.isOpen = true;
    part = mostChanged(part);
  }
}

// --- the table

const number = (value) => (value === null ? "" : value === 0 || (value >= 0.001 && value < 1e5) ?
  String(Number(value.toPrecision(3))) : value.toExponential(1));

function amountText(value, isEstimate) {
  if (!value) return "";
  const [norm, equal, largest] = value;
  const words = [norm === null ? "" : (isEstimate ? "about " : "") + "norm " + number(norm)];
  if (equal !== null) words.push(number(100 * equal) + " % equal");
  if (largest !== null) words.push("at most " + number(largest));
  return words.filter(Boolean).join(", ");
}

class TensorTable {
  constructor(facts) {
    Object.assign(this, { facts, sort: { by: "change", sign: 1 }, most: MOST_ROWS, at: facts.at });
    this.body = document.querySelector("#tensors tbody");
    $("search").addEventListener("input", () => this.show());
    for (const button of document.querySelectorAll("#tensors th button"))
      button.addEventListener("click", () => this.sortBy(button.dataset.sort));
    $("more").addEventListener("click", () => {
      this.most += MOST_ROWS;
      this.show();
    });
    this.choose(facts.at);
  }

  choose(at) {
    this.at = at;
    this.states = statesOf(this.facts, at);
    this.values = valuesOf(this.facts, at);
    this.whole = treeOf(this.facts, this.states, this.values, () => true);
    openChanged(this.whole);
    this.show();
  }

  sortBy(by) {
    this.sort = { by, sign: this.sort.by === by ? -this.sort.sign : 1 };
    this.show();
  }

  show() {
    for (const heading of document.querySelectorAll("#tensors th")) {
      const is = heading.querySelector("button")?.dataset.sort === this.sort.by;
      const isUp = (this.sort.sign > 0) === (this.sort.by === "name");
      heading.setAttribute("aria-sort", !is ? "none" : isUp ? "ascending" : "descending");
    }
    const words = $("search").value.toLowerCase();
    const root = words
      ? treeOf(this.facts, this.states, this.values, (name) => name.toLowerCase().includes(words))
      : this.whole;
    const rows = visibleRows(root, this.sort, Boolean(words));
    this.body.replaceChildren(...rows.slice(0, this.most).map((row) => this.row(row, Boolean(words))));
    $("more").hidden = rows.length <= this.most;
    $("found").textContent = words ? `${count(root.n)} of ${count(this.whole.n)} tensors` : "";
  }

  row(node, isAllOpen) {
    const isPart = Boolean(node.inner);
    const name = element("td", "name");
    if (isPart) {
      const isOpen = isAllOpen || node.isOpen;
      const button = element("button", "fold", (isOpen ? "\u25be " : "\u25b8 ") + node.label);
      button.setAttribute("aria-expanded", isOpen);
      button.addEventListener("click", () => {
        node.isOpen = !isOpen;
        this.show();
        for (const each of this.body.querySelectorAll("button.fold")) if (each.node === node) each.focus();
      });
      button.node = node;
      button.disabled = isAllOpen;
      name.append(button);
    } else {
      name.append(element("span", "leaf", node.label || "(bytes between tensors)"));
      name.title = node.name;
    }
    const { facts } = this;
    const dtype = isPart ? "" : facts.dtypes[facts.dtype[node.number]];
    const shape = isPart ? count(node.n) + (node.n === 1 ? " tensor" : " tensors") : facts.shapes[facts.shape[node.number]];
    name.dataset.spec = (dtype + " " + shape).trim();
    const kind = isPart ? (node.nChanged ? "part" : "shared") : node.kind;
    const state = isPart ? (node.nChanged ? `${count(node.nChanged)} of ${count(node.n)} changed` : "shared") : node.words;
    const amount = isPart ? (node.most >= 0 ? "up to norm " + number(node.most) : "")
      : amountText(node.value, facts.isEstimate);
    const cells = [
      name, element("td", "spec", dtype), element("td", "spec shape", shape),
      element("td", "size", sizeText(node.bytes)), element("td", kind, state),
    ];
    if (facts.values) cells.push(element("td", "amount", amount));
    const row = element("tr", isPart ? "fold" : "", ...cells);
    row.style.setProperty("--depth", node.depth - 1);
    return row;
  }
}

// --- steps, metrics and links

const count = (n) => n.toLocaleString("en");
const changedText = (step) => `${count(step.nChanged)} of ${count(step.n)} tensors changed`;

function chooseSteps(table, facts) {
  const select = $("step");
  if (!select) return;
  facts.steps.forEach((each, at) => {
    const words = "step " + each.step + (each.isDropped ? " (deleted)" : "");
    const option = element("option", "", words);
    option.value = at;
    select.append(option);
  });
  const choose = (at) => {
    at = Math.max(0, Math.min(facts.steps.length - 1, at));
    select.value = at;
    const each = facts.steps[at];
    $("earlier").disabled = at === 0;
    $("later").disabled = at === facts.steps.length - 1;
    $("chosen").textContent = `${each.created} UTC: ${changedText(each)} ` +
      `(${sizeText(each.changedBytes)})` + (each.stored === null ? "" : `, ${sizeText(each.stored)} stored`) +
      (at < facts.from ? ". This page no longer knows which." : "");
    for (const map of document.querySelectorAll(".cursor")) map.style.left = (100 * (at + 0.5)) / facts.steps.length + "%";
    table.choose(at);
  };
  select.addEventListener("change", () => choose(Number(select.value)));
  $("earlier").addEventListener("click", () => choose(table.at - 1));
  $("later").addEventListener("click", () => choose(table.at + 1));
  for (const map of document.querySelectorAll(".picture")) {
    const at = (event) => Math.floor(((event.clientX - map.getBoundingClientRect().left) / map.clientWidth) * facts.steps.length);
    map.addEventListener("click", (event) => choose(at(event)));
    map.addEventListener("mousemove", (event) => {
      const each = facts.steps[Math.max(0, Math.min(facts.steps.length - 1, at(event)))];
      map.title = `step ${each.step}: ${changedText(each)}`;
    });
  }
  for (const button of document.querySelectorAll("button[data-at]"))
    button.addEventListener("click", () => {
      choose(Number(button.dataset.at));
      $("tensors").scrollIntoView();
      select.focus();
    });
  choose(facts.at);
}

function chooseViews() {
  // A select with data-shows decides which of the elements with such a data-view is shown.
  for (const select of document.querySelectorAll("select[data-shows]")) {
    const views = document.querySelectorAll(`[data-view^="${select.dataset.shows}-"]`);
    const show = () => {
      for (const view of views) view.hidden = view.dataset.view !== `${select.dataset.shows}-${select.value}`;
    };
    select.addEventListener("change", show);
    select.hidden = false;
    show();
  }
}

function completeLinks() {
  // MLflow shows a page in a sandbox, at the address of its server behind "blob:".
  const isInViewer = location.protocol === "blob:";
  const here = new URL(isInViewer ? location.pathname : location.href);
  for (const link of document.querySelectorAll("a[data-to]")) {
    if (here.protocol.startsWith("http")) link.href = here.origin + link.dataset.prefix + link.dataset.to;
  }
  if (isInViewer && document.querySelector("a[href][data-to]")) $("blocked").hidden = false;
}

completeLinks();
chooseViews();
readFacts().then((facts) => chooseSteps(new TensorTable(facts), facts));
