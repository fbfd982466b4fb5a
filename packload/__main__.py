"""``python -m packload``."""

from packload.cli import app

if __name__ == "__main__":
    app()
