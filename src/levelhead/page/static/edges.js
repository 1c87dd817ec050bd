// What is wider than its place scrolls sideways: it fades at each edge behind which there is more, and while there is any,
// it is a stop for the Tab key, so that the arrow keys scroll it.

const labels = new WeakMap();
const sized = new ResizeObserver((entries) => entries.forEach(({ target }) => look(target.closest(".sideways"))));

/** Makes an element such a region; `label` says what it holds. */
export function sideways(element, label) {
  element.classList.add("sideways");
  labels.set(element, label);
  element.addEventListener("scroll", () => look(element), { passive: true });
  for (const one of [element, ...element.children]) sized.observe(one);
  return element;
}

/** Scrolls down where it is too tall: fades at its end while there is more below, and is a stop for the Tab key. What it
 * returns ends that. */
export function downwards(element, label) {
  const below = () => {
    const beyond = element.scrollHeight - element.clientHeight;
    element.toggleAttribute("data-below", beyond - element.scrollTop > 1);
    named(element, beyond > 1, label);
  };
  const seen = new ResizeObserver(below);
  for (const one of [element, ...element.children]) seen.observe(one);
  element.addEventListener("scroll", below, { passive: true });
  return () => seen.disconnect();
}

function look(element) {
  if (!element) return;
  const beyond = element.scrollWidth - element.clientWidth;
  const [left, right] = [element.scrollLeft > 1, element.scrollLeft < beyond - 1];
  element.dataset.more = [left && "left", right && "right"].filter(Boolean).join(" ");
  named(element, beyond > 1, labels.get(element));
}

function named(element, is, label) {
  const names = { tabindex: "0", role: "region", "aria-label": label };
  for (const [name, value] of Object.entries(names)) is ? element.setAttribute(name, value) : element.removeAttribute(name);
}
