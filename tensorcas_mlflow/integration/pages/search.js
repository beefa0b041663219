// Hides the rows of tables whose names lack the words in the box of a search.
"use strict";

const box = document.getElementById("search");
if (box) {
  box.hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase();
    for (const row of document.querySelectorAll("tr[data-name]"))
      row.hidden = !row.dataset.name.toLowerCase().includes(words);
  });
}
