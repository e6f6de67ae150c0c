// A few steps around the document. Text goes in as text: there is no way in for markup.

export const $ = (id) => document.getElementById(id);

/** A new element with a class, and a text or children. */
export function make(tag, className = "", content = null) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (Array.isArray(content)) element.append(...content);
  else if (content !== null) element.textContent = content;
  return element;
}

/** Sets a text if it is another: a live region speaks only of changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, shown) {
  element.hidden = !shown;
}

/**
 * Makes the children of `parent` those of `items`, in their order. An item's element is kept from one call to the next, so that the
 * focus and a selection stay where they are.
 */
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  // Not only what is known by its key: two items may have the same one, such as an id that clients chose.
  while (parent.children.length > items.length) parent.lastElementChild.remove();
}

/** A row for each item and a cell for each column: `{name, className, fill(cell, item)}`. Rows are kept as `keyed` keeps elements. */
export function fillTable(table, columns, items, keyOf) {
  if (table.tHead === null) {
    table.append(make("thead", "", [make("tr", "", columns.map(() => Object.assign(make("th"), { scope: "col" })))]), make("tbody"));
  }
  columns.forEach((column, index) => {
    const head = table.tHead.rows[0].cells[index];
    head.className = column.className === "number" ? "number" : "";
    say(head, column.name);
  });
  keyed(
    table.tBodies[0],
    items,
    keyOf,
    () => make("tr", "", columns.map((column) => make("td", column.className ?? ""))),
    (row, item) => columns.forEach((column, index) => column.fill(row.cells[index], item)),
  );
}

/** What a custom property of the style sheet comes to as a colour, in the theme of the moment. */
export function colour(name) {
  const probe = $("colour-probe") ?? document.body.appendChild(Object.assign(make("i"), { id: "colour-probe", hidden: true }));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
