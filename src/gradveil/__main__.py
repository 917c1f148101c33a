"""``python -m gradveil``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which -m puts first: nothing of it is to be imported
    from gradveil.cli.main import program

    program()
