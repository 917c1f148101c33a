// Comfort only: the page says everything without it. Pictures open large beside their original, figures answer.
'use strict';

// ---- a picture, large, with a slider between it and its original ----
const dialog = document.getElementById('large');
const [under, over] = ['original', 'reconstruction'].map(alt => {
  const img = document.createElement('img');
  img.alt = alt;
  return img;
});
const slider = dialog.querySelector('input');
const groups = [...document.querySelectorAll('.trio, .card, .shots, .film')]
  .map(group => [...group.querySelectorAll('img')]).filter(all => all.length);
let shown = null;

function slide() {
  over.style.clipPath = `inset(0 0 0 ${100 - slider.value}%)`;
}

function show(img) {
  const original = document.querySelector(`img[data-original="${img.dataset.example}"]`);
  const both = Boolean(original);
  shown = img;
  under.src = both ? original.src : img.src;
  over.src = img.src;
  over.hidden = !both;
  slider.parentElement.hidden = !both;
  const strip = img.closest('.strip, .card, .hero, .film');
  const what = strip && strip.querySelector('.what, h3 .named');
  const words = [what ? what.firstChild.textContent.trim() : '', img.alt].filter(Boolean).join(': ');
  document.getElementById('large-text').textContent = words;
  slide();
  dialog.querySelector('.stage').replaceChildren(under, over);
  if (!dialog.open) dialog.showModal();
}

function go(by) {
  const all = groups.find(group => group.includes(shown));
  show(all[(all.indexOf(shown) + by + all.length) % all.length]);
}

for (const all of groups) {
  all.forEach((img, place) => {
    img.tabIndex = place === 0 ? 0 : -1; // one stop for each group: arrows move within it
    img.setAttribute('role', 'button');
    img.setAttribute('aria-haspopup', 'dialog');
    img.title = img.alt;
    img.addEventListener('click', () => show(img));
    img.addEventListener('keydown', event => {
      const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (by) {
        const next = all[(place + by + all.length) % all.length];
        img.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
        event.preventDefault();
      } else if (event.key === 'Enter' || event.key === ' ') {
        show(img);
        event.preventDefault();
      }
    });
  });
}
slider.addEventListener('input', slide);
dialog.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (event.target === dialog || (button && 'close' in button.dataset)) dialog.close();
  else if (button) go(Number(button.dataset.go));
});
dialog.addEventListener('close', () => shown && shown.focus());

// ---- figures: what a mark says, on hover and for the keyboard; a defence by itself ----
const tip = document.getElementById('tip');

function tell(mark) {
  tip.textContent = mark.getAttribute('aria-label');
  tip.hidden = false;
  const at = mark.getBoundingClientRect(), box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left - box.width / 2), document.documentElement.clientWidth - box.width - 8);
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${(at.top > box.height + 16 ? at.top - box.height - 10 : at.bottom + 10) + window.scrollY}px`;
}

for (const mark of document.querySelectorAll('svg [aria-label][data-series]')) {
  mark.querySelector('title')?.remove(); // this tip takes its place
  for (const when of ['mouseenter', 'focus']) mark.addEventListener(when, () => tell(mark));
  for (const when of ['mouseleave', 'blur']) mark.addEventListener(when, () => { tip.hidden = true; });
}
document.addEventListener('keydown', event => { if (event.key === 'Escape') tip.hidden = true; });

for (const entry of document.querySelectorAll('svg .legend')) {
  const figure = entry.closest('svg'), series = entry.dataset.legend;
  entry.tabIndex = 0;
  entry.setAttribute('role', 'button');
  entry.setAttribute('aria-pressed', 'false');
  entry.setAttribute('aria-label', `${entry.querySelector('text').firstChild.textContent} alone`);
  const press = () => {
    const alone = entry.getAttribute('aria-pressed') !== 'true';
    for (const other of figure.querySelectorAll('.legend')) {
      other.setAttribute('aria-pressed', String(alone && other === entry));
      other.classList.toggle('off', alone && other !== entry);
    }
    for (const mark of figure.querySelectorAll('[data-series]'))
      mark.classList.toggle('off', alone && mark.dataset.series !== series);
  };
  entry.addEventListener('click', press);
  entry.addEventListener('keydown', event => {
    if (event.key === 'Enter' || event.key === ' ') { press(); event.preventDefault(); }
  });
}
