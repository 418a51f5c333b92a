// Marks a table or a picture while it has more to its right; style.css lets it fade there.
addEventListener("load", () => {
  const mark = (box) => box.classList.toggle("has-more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  const sizes = new ResizeObserver((changed) => changed.forEach((each) => mark(each.target)));
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .picture")) {
    box.tabIndex = 0; // the arrow keys scroll it
    box.addEventListener("scroll", () => mark(box), { passive: true });
    sizes.observe(box);
  }
});
