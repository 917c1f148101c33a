"""``python -m gradveil``."""

from gradveil.cli.main import entry

if __name__ == "__main__":
    entry()
