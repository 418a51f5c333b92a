"""A trace as an HTML page: the picture from `timeline.py`, and a script that zooms and moves it. Needs no network.

The content security policy allows this script alone, by its hash. A name that passed the escaping could still not run.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape

from stio.errors import printable

_SCRIPT = """
const root = document.querySelector("svg.stio"), plot = root.querySelector("svg.plot");
const grid = plot.querySelector("path.grid"), axis = root.querySelector("g.axis");
const left = +plot.getAttribute("x"), y = +plot.getAttribute("y"), W = +plot.getAttribute("width");
const H = +plot.getAttribute("height"), total = +plot.dataset.seconds;
const [factor, unit] = total < 1e-3 ? [1e6, "µs"] : total < 1 ? [1e3, "ms"] : [1, "s"];
let from = 0, width = W, dragged = null;

function show(start, size) {
  width = Math.min(W, Math.max(W / 1e5, size));
  from = Math.min(W - width, Math.max(0, start));
  plot.setAttribute("viewBox", `${from} 0 ${width} ${H}`);
  const rough = total * width / W / 7, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(times => times * power >= rough * 0.999) * power;
  let lines = "";
  axis.replaceChildren();
  for (let k = Math.ceil(from / W * total / step - 1e-6); k * step <= (from + width) / W * total * 1.000001; k++) {
    const x = k * step / total * W, label = document.createElementNS(axis.namespaceURI, "text");
    lines += `M${x} 0v${H}`;
    label.setAttribute("class", "soft");
    label.setAttribute("x", left + (x - from) * W / width);
    label.setAttribute("y", y + H + 18);
    label.setAttribute("text-anchor", "middle");
    label.textContent = `${+(k * step * factor).toPrecision(7)} ${unit}`;
    axis.append(label);
  }
  grid.setAttribute("d", lines);
}

const place = event =>  // along the plot, from 0 to 1
  (new DOMPoint(event.clientX, event.clientY).matrixTransform(root.getScreenCTM().inverse()).x - left) / W;
root.addEventListener("wheel", event => {
  event.preventDefault();
  const at = place(event), size = Math.min(W, width * Math.exp(event.deltaY * 0.002));
  show(from + at * (width - size), size);
}, { passive: false });
root.addEventListener("pointerdown", event => { dragged = place(event); root.setPointerCapture(event.pointerId); });
root.addEventListener("pointermove", event => {
  if (dragged === null) return;
  const at = place(event);
  show(from + (dragged - at) * width, width);
  dragged = at;
});
root.addEventListener("pointerup", () => { dragged = null; });
root.addEventListener("pointercancel", () => { dragged = null; });
root.addEventListener("dblclick", () => show(0, W));
"""

_STYLE = """
body{margin:0;background:#fff;color:#59636e;font:13px system-ui,sans-serif}
body>svg{display:block;width:100%;height:auto;max-height:94vh;cursor:grab;touch-action:none}
body>p{margin:4px 14px}
@media (prefers-color-scheme:dark){body{background:#0d1117;color:#9198a1}}
"""


def page(svg: str, *, title: str = "") -> str:
    """Return an HTML page with a picture.

    Args:
        svg: The result of `stio.runtime.timeline.draw`.
        title: Title of the page.
    """
    digest = b64encode(sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(printable(title or 'what stio did'))}</title><style>{_STYLE}</style></head>\n<body>{svg}"
        "<p>Turn the wheel to zoom, drag to move, double-click to see everything. Hover over a bar for details.</p>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )
