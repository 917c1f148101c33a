// A filter above the tables of a page: by section, by words, and only the rows in which something does not work.
const failing = /^(no|no:.*|not reproduced|not run|error.*)$/;

const build = (home) => {
  const headings = [...home.querySelectorAll(":scope > h3")];
  const sections = headings.map((heading) => {
    const members = [heading];
    for (let e = heading.nextElementSibling; e && e.tagName !== "H3"; e = e.nextElementSibling) members.push(e);
    return { heading, members };
  });
  const bar = document.createElement("form");
  bar.className = "filter";
  bar.innerHTML =
    '<label>Show <select></select></label> <label>Containing <input type="search"></label> ' +
    '<label><input type="checkbox"> only what does not work</label> <output></output>';
  const [select, words, only] = bar.querySelectorAll("select, input");
  const name = (section) => section.heading.firstChild.textContent.trim();
  if (!home.classList.contains("one")) select.add(new Option("everything", ""));
  sections.forEach((section) => select.add(new Option(name(section), section.heading.id)));
  const rows = [...home.querySelectorAll("tbody tr")];
  const fails = (row) => [...row.cells].some((cell) => failing.test(cell.textContent.trim()));
  if (!rows.some(fails)) only.parentElement.remove();

  const update = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const section of sections) {
      const open = !select.value || select.value === section.heading.id;
      section.members.forEach((e) => { e.hidden = !open; });
      if (!open) continue;
      for (const row of section.members.flatMap((e) => [...e.querySelectorAll("tbody tr")])) {
        const text = row.textContent.toLowerCase();
        row.hidden = !wanted.every((word) => text.includes(word)) || (only.checked && !fails(row));
        shown += row.hidden ? 0 : 1;
      }
      for (const table of section.members.flatMap((e) => [...e.querySelectorAll("table")])) {
        table.hidden = [...table.tBodies].every((body) => [...body.rows].every((row) => row.hidden));
      }
    }
    bar.querySelector("output").textContent = `${shown} rows`;
  };
  const follow = () => {
    const id = decodeURIComponent(location.hash.slice(1));
    if (sections.some((section) => section.heading.id === id)) {
      select.value = id;
      update();
      document.getElementById(id).scrollIntoView();
    }
  };
  bar.addEventListener("input", update);
  bar.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", follow);
  home.prepend(bar);
  update();
  follow();
};

document.querySelectorAll(".filtered").forEach(build);
