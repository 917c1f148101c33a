"""Run the notebooks under examples/notebooks and keep what they print and show; no Jupyter is needed.

python tools/notebooks.py            # run them and write their outputs
python tools/notebooks.py --check    # run them; fail where a cell fails, or shows other things than are kept

Their cells are plain Python, run in order in one namespace. As in Jupyter, a last line that is an expression is shown.
"""

import ast
import base64
import io
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"


def run(cell: dict, number: int, names: dict) -> list[dict]:
    """Run one cell and return what it printed and what its last line is, as a notebook keeps them."""
    code = ast.parse("".join(cell["source"]))
    last = ast.Expression(code.body.pop().value) if isinstance(code.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(code, f"cell {number}", "exec"), names)  # noqa: S102 - the project's own notebooks
        if last is not None:
            value = eval(compile(last, f"cell {number}", "eval"), names)  # noqa: S307
    kept = []
    if printed.getvalue():
        kept.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": [repr(value).partition(" at 0x")[0]]}
        if hasattr(value, "_repr_png_"):
            data["image/png"] = base64.b64encode(value._repr_png_()).decode()
        kept.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return kept


def shape(outputs: list[dict]) -> list[tuple]:
    """What kinds of output a cell has, and how many lines it printed: numbers may differ between machines."""
    return [(one["output_type"], len(one.get("text", ())), *sorted(one.get("data", ()))) for one in outputs]


def main(check: bool) -> int:
    """Run all notebooks; return how many are not as they are kept."""
    wrong = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook, names, begun = json.loads(path.read_text()), {"__name__": "__main__"}, time.process_time()
        for number, cell in enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), 1):
            outputs = run(cell, number, names)
            if check and shape(outputs) != shape(cell["outputs"]):
                print(f"{path.name}, cell {number}: {shape(outputs)}, and kept is {shape(cell['outputs'])}")
                wrong += 1
            cell["outputs"], cell["execution_count"] = outputs, number
        if not check:
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {time.process_time() - begun:.1f} CPU seconds", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
