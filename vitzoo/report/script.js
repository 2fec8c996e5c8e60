'use strict';

// data-value is the unrounded value of a cell; cells without one are last in either order
function sortRows(table, column, order) {
  const body = table.tBodies[0];
  const value = (row) => row.cells[column].dataset.value;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    const difference = isNaN(x) || isNaN(y) ? x.localeCompare(y, 'en', { numeric: true }) : x - y;
    return order === 'ascending' ? difference : -difference;
  };
  body.append(...[...body.rows].sort(compare));
}

for (const table of document.querySelectorAll('table.models')) {
  const headings = [...table.tHead.rows[0].cells];
  for (const [column, heading] of headings.entries()) {
    const button = heading.querySelector('button');
    button.addEventListener('click', () => {
      const now = heading.getAttribute('aria-sort');
      const other = { ascending: 'descending', descending: 'ascending' };
      const order = other[now] ?? button.dataset.first;
      for (const each of headings) each.setAttribute('aria-sort', 'none');
      heading.setAttribute('aria-sort', order);
      sortRows(table, column, order);
    });
  }
}

// the system's light or dark theme, unless the user chose the other
const toggle = document.getElementById('theme');
const system = matchMedia('(prefers-color-scheme: dark)');
const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? 'dark' : 'light')) === 'dark';
function showTheme() {
  toggle.textContent = isDark() ? 'Light' : 'Dark';
  toggle.setAttribute('aria-pressed', String(isDark()));
}
function recall() {
  // local storage may be disabled for local files
  try { return localStorage.getItem('vitzoo-theme'); } catch { return null; }
}
function remember(theme) {
  try { localStorage.setItem('vitzoo-theme', theme); } catch { return; }
}
toggle.addEventListener('click', () => {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  remember(document.documentElement.dataset.theme);
  showTheme();
});
if (recall()) document.documentElement.dataset.theme = recall();
system.addEventListener('change', showTheme);
showTheme();

// hovering over a model highlights it in all charts, and hovering over a mark shows its values
const tip = document.getElementById('tip');
const marks = document.querySelectorAll('[data-model]');
function showModel(number) {
  for (const mark of marks) mark.classList.toggle('faded', number !== undefined && mark.dataset.model !== number);
}
document.addEventListener('pointerover', (event) => {
  showModel(event.target.closest('[data-model]')?.dataset.model);
  const text = event.target.closest('[data-tip]')?.dataset.tip;
  tip.hidden = !text;
  if (text) tip.textContent = text;
});
document.addEventListener('pointermove', (event) => {
  if (tip.hidden) return;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.max(event.clientY - tip.offsetHeight - 10, 8)}px`;
});
