// The clipboard.

/** Puts a text on the clipboard; false where the browser does not let a page do that. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
