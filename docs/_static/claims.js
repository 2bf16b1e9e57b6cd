// The filter of the table of all claims: words, paper, preset, verdict. Works from a file, without a server.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("claims");
  if (!table) return;
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, text: row.textContent.toLowerCase() }));
  const words = document.getElementById("claims-words");
  const count = document.getElementById("claims-count");
  const choices = ["paper", "preset", "verdict"].map((name) => {
    const select = document.getElementById(`claims-${name}`);
    for (const value of new Set(rows.map(({ row }) => row.dataset[name]))) select.add(new Option(value, value));
    return { name, select };
  });
  const filter = () => {
    const needed = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { row, text } of rows) {
      const fits =
        choices.every(({ name, select }) => !select.value || row.dataset[name] === select.value) &&
        needed.every((word) => text.includes(word));
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${rows.length} claims`;
  };
  for (const { select } of choices) select.addEventListener("change", filter);
  words.addEventListener("input", filter);
  filter();
});
