"""Write docs/compatibility.md from the test matrix over the zoo of models."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from compatibility.page import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page())
