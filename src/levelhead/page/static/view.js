// Which of the two views an address opens.

const PLACES = /^(logits|walk|root|jacobian|training|additive|attack|online|sentence|heads|speed|claims|claim-.+)$/;

/** "bench": its settings, `#d_k=64&scale=none`, one of its places, or its name. Everything else opens the story. */
export function view(hash) {
  const text = hash.replace(/^#/, "");
  if (text.startsWith("/")) return "story";
  return text === "bench" || text.includes("=") || PLACES.test(text) ? "bench" : "story";
}
