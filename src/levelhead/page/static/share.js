// Links for other people. The address of a page that this machine serves, or of a file on it, is of no use to them.

import { SITE } from "./declared.js";

const MINE = /^(localhost|127\.0\.0\.1|\[::1\])$/;

/** Where the documentation is: beside a page of the site, on the site that is set, or null. */
export function documentation() {
  const beside = document.querySelector("link[rel=help]");
  if (beside) return beside.getAttribute("href");
  return SITE ? `${SITE}/docs/index.html` : null;
}

/** The address of this state: on the site if one is set, here if this page is on the web, else what follows the #. */
export function shared(hash) {
  if (SITE) return `${SITE}/index.html${hash}`;
  const open = location.protocol.startsWith("http") && !MINE.test(location.hostname);
  return open ? location.href.replace(/#.*$/, "") + hash : hash;
}
