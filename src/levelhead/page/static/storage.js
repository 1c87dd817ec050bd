// What the browser keeps between visits. Where it keeps nothing (switched off, full, a file), memory does until the page
// is closed.

const memory = new Map();
const PREFIX = "levelhead-";

export function recall(name) {
  try {
    return localStorage.getItem(PREFIX + name) ?? memory.get(name) ?? null;
  } catch {
    return memory.get(name) ?? null;
  }
}

/** Whether the browser keeps anything here. */
export function lasting() {
  try {
    localStorage.setItem(`${PREFIX}probe`, "1");
    localStorage.removeItem(`${PREFIX}probe`);
    return true;
  } catch {
    return false;
  }
}

export function keep(name, text) {
  memory.set(name, text);
  try {
    localStorage.setItem(PREFIX + name, text);
  } catch {
    // memory has it
  }
}
