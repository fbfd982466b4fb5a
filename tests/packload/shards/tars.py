"""Archives for tests, made by Python's own tarfile."""

import io
import tarfile
from pathlib import Path

from packload.shards import index_name
from packload.shards.index import ShardIndex, build_index


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def make_tar(path: Path, members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            add(tar, name, content)
    return path


def index_it(path: Path, **arguments) -> ShardIndex:
    with open(path, "rb") as stream:
        index = build_index(stream, path.name, path.stat().st_size, **arguments)
    Path(index_name(str(path))).write_bytes(index.to_bytes())
    return index


def make_shards(folder: Path, count: int, samples: int) -> list[Path]:
    """Shards of text samples with an index each; sample i of shard s is ``word * (i + 1)`` and label s."""
    paths = []
    for s in range(count):
        members = {}
        for i in range(samples):
            members[f"s{s}-{i:03d}.txt"] = " ".join(["word"] * (i + 1)).encode()
            members[f"s{s}-{i:03d}.cls"] = str(s).encode()
        paths.append(make_tar(folder / f"shard-{s:06d}.tar", members))
        index_it(paths[-1])
    return paths
