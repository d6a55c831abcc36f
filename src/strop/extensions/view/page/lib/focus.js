// Where the focus goes when another view is opened: to its heading, once that is there, so that a screen reader begins with it.
let isWanted = false;

/** Call when another view is opened. */
export function wantHeading() {
  isWanted = true;
  focusHeading();
}

/** Call when a heading is drawn. The focus stays where a reader has put it meanwhile. */
export function focusHeading() {
  if (!isWanted) return;
  const heading = document.querySelector("main h1");
  if (!heading) return;
  isWanted = false;
  const { activeElement: at } = document;
  if (!at || at === document.body || at.closest(".side") || at.matches("h1")) heading.focus({ preventScroll: true });
}

/** Scroll a list of links as little as shows one of them. Unlike scrollIntoView, the first press of Tab still goes to the first link. */
export function scrollTo(link, list) {
  if (!link) return;
  const [inner, outer] = [link.getBoundingClientRect(), list.getBoundingClientRect()];
  if (inner.left < outer.left) list.scrollLeft += inner.left - outer.left;
  if (inner.right > outer.right) list.scrollLeft += inner.right - outer.right;
}
