// Filters for the table of claims. Without this script the page shows the same claims.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector(".ledger table");
  if (!table) return;
  const rows = [...table.tBodies[0].rows], names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const said = (row, column) => row.cells[column].textContent;
  for (const row of rows) row.dataset.outcome = said(row, names.indexOf("outcome"));

  const filters = Object.assign(document.createElement("form"), { className: "filters" });
  const shown = document.createElement("output");
  const state = new URLSearchParams(location.search);
  const selects = ["document", "by", "outcome", "basis"].map((name) => {
    const select = document.createElement("select"), label = document.createElement("label"), column = names.indexOf(name);
    const values = [...new Set(rows.map((row) => said(row, column)))].sort();
    select.append(new Option("all", ""), ...values.map((value) => new Option(value)));
    select.value = values.includes(state.get(name)) ? state.get(name) : "";
    label.append(name, select);
    filters.append(label);
    return { name, select, column };
  });
  const apply = () => {
    for (const row of rows) {
      row.hidden = selects.some(({ select, column }) => select.value && said(row, column) !== select.value);
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
    for (const { name, select } of selects) select.value ? state.set(name, select.value) : state.delete(name);
    history.replaceState(null, "", `${location.pathname}${state.size ? `?${state}` : ""}${location.hash}`);
  };
  shown.setAttribute("aria-live", "polite");
  filters.append(shown);
  filters.addEventListener("input", apply);
  table.closest(".ledger").prepend(filters);
  apply();
});
