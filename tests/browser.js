// What keeps somebody from reading a page as it is now: a list of sentences. Evaluated in the page by tests/browser.py.
() => {
  const faults = new Set();
  const root = document.documentElement;
  const shown = (text) => JSON.stringify(text.trim().slice(0, 60));

  if (!root.lang) faults.add("the page does not say its language");
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.querySelectorAll("th")];
    if (!heads.some((head) => head.textContent.trim())) faults.add(`table without headers: ${shown(table.textContent)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids.filter((id, i) => ids.indexOf(id) !== i)) faults.add(`id that is not unique: ${id}`);

  // -- width ----------------------------------------------------------------------------------
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...document.body.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > root.clientWidth + 1);
    const names = wide.slice(0, 5).map((element) => element.outerHTML.slice(0, 80));
    faults.add(`wider than the window: ${root.scrollWidth} of ${root.clientWidth} pixels, ${names.join(" ")}`);
  }

  // -- colours: [red, green, blue, alpha], 0 to 255 and 0 to 1 ----------------------------------
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const colour = (css) => {
    if (!known.has(css)) {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = css;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      known.set(css, [r, g, b, a / 255]);
    }
    return known.get(css);
  };
  const over = (above, below, opacity = 1) => {
    const alpha = above[3] * opacity;
    return [0, 1, 2].map((i) => above[i] * alpha + below[i] * (1 - alpha)).concat(1);
  };
  const luminance = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const probe = document.body.appendChild(document.createElement("div"));
  probe.style.backgroundColor = "Canvas";
  const canvas = colour(getComputedStyle(probe).backgroundColor);
  probe.remove();

  // The colours behind an element, from the bottom up; in a drawing also the rectangles drawn before it under its middle.
  const behind = (element, middle) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const style = getComputedStyle(each);
      if (style.backgroundImage !== "none") faults.add(`text over an image: ${shown(element.textContent)}`);
      layers.unshift([style.backgroundColor, 1]);
    }
    const drawing = element.closest("svg");
    for (const rect of drawing ? drawing.querySelectorAll("rect") : []) {
      const box = rect.getBoundingClientRect();
      const under = box.left <= middle.x && middle.x <= box.right && box.top <= middle.y && middle.y <= box.bottom;
      const before = rect.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING;
      const style = getComputedStyle(rect);
      if (under && before && style.fill !== "none") layers.push([style.fill, style.fillOpacity * style.opacity]);
    }
    return layers.reduce((below, [css, opacity]) => over(colour(css), below, opacity), canvas);
  };

  // -- text -------------------------------------------------------------------------------------
  const inDrawings = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data;
    const element = walk.currentNode.parentElement;
    if (!text.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(walk.currentNode);
    const box = range.getBoundingClientRect();
    if (box.width <= 1 || box.height <= 1) continue; // for screen readers, or what a drawing says only on hover
    if (element.closest("[aria-hidden=true]")) continue; // an ornament

    const drawing = element.closest("svg");
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize) * (drawing ? element.getScreenCTM().a : 1);
    if (size < 10) faults.add(`letters of ${size.toFixed(1)} pixels: ${shown(text)}`);
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) opacity *= getComputedStyle(each).opacity;
    const ground = behind(element, { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2 });
    const ratio = contrast(over(colour(drawing ? style.fill : style.color), ground, opacity), ground);
    if (ratio < 4.5) faults.add(`contrast ${ratio.toFixed(1)}: ${shown(text)}`);
    if (drawing) inDrawings.set(drawing, [...(inDrawings.get(drawing) ?? []), [box, text]]);
  }

  for (const [drawing, texts] of inDrawings) {
    const frame = drawing.getBoundingClientRect();
    texts.forEach(([a, text], i) => {
      const out = a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1;
      if (out) faults.add(`cut off: ${shown(text)}`);
      for (const [b, other] of texts.slice(i + 1)) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) faults.add(`one over the other: ${shown(text)} and ${shown(other)}`);
      }
    });
  }
  return [...faults];
}
