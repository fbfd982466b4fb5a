"""Real pictures of many sizes: those of the package ``mvtb-data``, found without importing it."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image


def picture_files() -> list[Path]:
    """The pictures of the installed package ``mvtb-data``, in order of their names.

    Raises FileNotFoundError, with the command that installs it, when it is missing.
    """
    spec = importlib.util.find_spec("mvtbdata")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        files = [path for path in Path(folder).rglob("*") if path.suffix in (".png", ".jpg")]
        if files:
            return sorted(files)
    raise FileNotFoundError("the pictures are not installed: pip install 'packload[images]'")


def views(count: int, short: tuple[int, int], seed: int = 0) -> Iterator[tuple[Image.Image, int]]:
    """``count`` pictures in RGB and the number of the folder each came from.

    Each is a part of a picture, at least half as wide and high, made smaller so that its shorter side lies in
    ``short``.
    """
    files = [path for path in picture_files() if min(Image.open(path).size) >= 64]
    folders = sorted({path.parent.name for path in files})
    rng = np.random.default_rng(seed)
    kept: dict[Path, Image.Image] = {}
    for i in range(count):
        path = files[i % len(files)]
        if path not in kept:
            picture = Image.open(path).convert("RGB")
            picture.thumbnail((1600, 1600))
            kept[path] = picture
        picture = kept[path]
        w, h = (int(side * part) for side, part in zip(picture.size, rng.uniform(0.5, 1, 2)))
        x, y = int(rng.integers(picture.width - w + 1)), int(rng.integers(picture.height - h + 1))
        scale = int(rng.integers(short[0], short[1] + 1)) / min(w, h)
        size = (max(1, round(w * scale)), max(1, round(h * scale)))
        yield picture.crop((x, y, x + w, y + h)).resize(size), folders.index(path.parent.name)
