"""Pages in a real browser: what they complain of, whether they fit, whether their text can be read."""

from typing import Any

Rgb = list[float]


def open_page(browser: Any, address: str, width: int, scheme: str) -> tuple[Any, list[str]]:
    """Open a page; what it complains of, and what it asks for from elsewhere, is in the list."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    here = ("data:", "file:", "about:")
    page.on("request", lambda r: None if r.url.startswith(here) else trouble.append(f"request: {r.url}"))
    page.goto(address)
    return page, trouble


# Every visible element with text of its own: its words, size in pixels, and the colours from its own to the page's.
_TEXTS = """() => [...document.querySelectorAll('body *')].filter(e => {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
  const box = e.getBoundingClientRect()
  return own && box.width > 1 && box.height > 1 && e.checkVisibility({opacityProperty: true, visibilityProperty: true})
}).map(e => {
  const grounds = []
  for (let up = e; up; up = up.parentElement) grounds.push(getComputedStyle(up).backgroundColor)
  const style = getComputedStyle(e)
  const inSvg = e.namespaceURI.endsWith('svg')
  const bold = parseInt(style.fontWeight) >= 700
  return {text: e.textContent.trim().slice(0, 40), ink: inSvg ? style.fill : style.color, grounds,
          size: parseFloat(style.fontSize), bold}
})"""


def faint(page: Any) -> list[str]:
    """Return the texts that stand out too little from their ground: WCAG 2, level AA."""
    found = []
    for text in page.evaluate(_TEXTS):
        ground = [255.0, 255.0, 255.0]
        for colour in reversed(text["grounds"]):
            ground = _over(colour, ground)
        large = text["size"] >= 24 or (text["bold"] and text["size"] >= 18.66)
        ratio = contrast(_over(text["ink"], ground), ground)
        if ratio < (3 if large else 4.5):
            found.append(f"{text['text']!r}: {text['ink']} on {ground}: {ratio:.2f}")
    return found


def contrast(a: Rgb, b: Rgb) -> float:
    """The contrast ratio of WCAG 2 between two colours in 0..255."""

    def luminance(rgb: Rgb) -> float:
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def rgb(text: str) -> Rgb:
    """Read a computed colour, without its opacity."""
    return [float(part) for part in text.strip("rgba()").split(",")[:3]]


def _over(colour: str, ground: Rgb) -> Rgb:
    parts = [float(part) for part in colour.strip("rgba()").split(",")]
    opacity = parts[3] if len(parts) == 4 else 1.0
    return [opacity * c + (1 - opacity) * g for c, g in zip(parts[:3], ground, strict=True)]
