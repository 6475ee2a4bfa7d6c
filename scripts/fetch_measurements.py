"""Writes the tables of measurements that validate.py reads, from the public repositories that they come from.

    python scripts/fetch_measurements.py FOLDER                    from the network, each repository at its commit
    python scripts/fetch_measurements.py FOLDER --from CHECKOUTS   from a folder that holds them, by their names
    python scripts/fetch_measurements.py --list                    the sources: repository, commit, checksum, licence
    python scripts/validate.py --all FOLDER --markdown             then: the table of the README

Only the files that the tables are made of are looked at, and their checksum must be the pinned one (--any-version says
that it may differ). FOLDER/SOURCES.txt says what the tables were made of. The measurements are their owners', under
their licences; none is part of this repository.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fnmatch
import hashlib
import io
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from measurement_tables import (
    LAYERS,
    NVIDIA_SYSTEMS,
    TRACES,
    VECTOR_FOLDERS,
    TableError,
    Tables,
    aiconfigurator,
    neusight,
    timm,
    traces,
    vidur,
)

NOT_WRITTEN = (
    "neusight/: operators that were timed inside of networks (source `net`), a twentieth of the rows behind the README",
    "neusight/e2e.csv: mixtures of experts (switch), which validate.py leaves out",
    "papers/: published runs, read by hand from the documents that each line names; no repository holds that table",
)


class Source(NamedTuple):
    """A public repository at one commit, and the tables that are made of it."""

    name: str  # of its checkout's folder
    repository: str  # on GitHub
    commit: str
    licence: str
    files: tuple[str, ...]  # patterns of the paths that the tables are made of
    sha256: str  # of those files, see `checksum`
    tables: Callable[[Path], Tables]

    @property
    def archive(self) -> str:
        return f"https://codeload.github.com/{self.repository}/tar.gz/{self.commit}"


_NEUSIGHT = "scripts/asplos"
_AICONFIGURATOR = "aic-core/src/aiconfigurator_core/systems/data"
SOURCES = (
    Source(
        "NeuSight",
        "sitar-lab/NeuSight",
        "6945927d9afcca2b9daf021f8395e53edc5b4eef",
        "MIT",
        (
            f"{_NEUSIGHT}/data/dataset/train/collect/*/p2.1.0/*.csv",
            *(f"{_NEUSIGHT}/data/dataset/test/{name}.csv" for name in ("linear", "bmm", "softmax", "ln", "elem")),
            f"{_NEUSIGHT}/data/dataset_amd/test/collect/*/p2.4.1/*.csv",
            *(f"{_NEUSIGHT}/data/dataset_amd/train/collect/{name}/p2.4.1/*.csv" for name in VECTOR_FOLDERS),
            f"{_NEUSIGHT}/data/DLmodel_configs/*.json",
            *(f"{_NEUSIGHT}/label/*/{family}*.{kind}" for family in LAYERS for kind in ("csv", "json")),
            *(f"{_NEUSIGHT}/results/prediction/*/*/{family}*.json" for family in LAYERS),
        ),
        "7aa23cec780452295e3221e65db1090d826d0134ad173a7b0aa3d2ec8a445e5f",
        neusight,
    ),
    Source(
        "pytorch-image-models",
        "huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d",
        "Apache-2.0",
        ("results/benchmark-*-amp-*-rtx[34]090*.csv", "results/benchmark-infer-amp-nchw-pt291-*-[45]090*.csv"),
        "00bc0af78bb7cd0171b25b129bb17e0647b1e96e24d325fc6f612f5d1c25351c",
        timm,
    ),
    Source(
        "aiconfigurator",
        "ai-dynamo/aiconfigurator",
        "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
        "Apache-2.0",
        tuple(
            f"{_AICONFIGURATOR}/{system}/{kind}/*_perf.parquet"
            for system in NVIDIA_SYSTEMS
            for kind in ("gemm/*/*", "attention/*/*", "encoder_attention/*/*", "moe/*/*", "comm/nccl/*")
        ),
        "0044fd982c0622268d8fcd78607f0a0231e09eda583c8e786c4c58ef2d1fa61b",
        aiconfigurator,
    ),
    Source(
        "vidur",
        "microsoft/vidur",
        "7d47513363ec447a741ac5e47241580b47724fbf",
        "MIT",
        tuple(f"data/profiling/compute/{gpu}/*/*/mlp.csv" for gpu in ("a100", "a40")),
        "166449ec71ee593d6becd6c46b5481e0a4f3eb94dc7c7d350783f2ccf2b8748c",
        vidur,
    ),
    Source(
        "TraceLens",
        "AMD-AGI/TraceLens",
        "171dd74721ca1ec45709e5805b68ae1f65e27811",
        "MIT",
        tuple(path for path in TRACES.values() if path.startswith("tests/traces")),
        "87ff9caf81bc27189347cb8c9fca95cfcae4d24bbc1c135f31385932c82fc6e5",
        traces,
    ),
    Source(
        "HolisticTraceAnalysis",
        "facebookresearch/HolisticTraceAnalysis",
        "f4d0062c382f42bd8a74838bcdad1916c7d5d2da",
        "MIT",
        (TRACES["v100_old_format"],),
        "de382a3d47ec16dfe11caac9b0b561efcdc19642dd9f6c995c53db7a03838fa5",
        traces,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where the tables go")
    parser.add_argument("--from", dest="checkouts", type=Path, metavar="CHECKOUTS", help="of the repositories, here")
    parser.add_argument("--only", metavar="NAME,NAME", help="only these sources")
    parser.add_argument("--any-version", action="store_true", help="take files that are not those of the pinned commit")
    parser.add_argument("--list", action="store_true", help="the sources, and nothing else")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(_told(source) for source in SOURCES))
        return
    if arguments.folder is None:
        parser.error("say where the tables go: fetch_measurements.py FOLDER")
    try:
        fetch(arguments.folder, _chosen(arguments.only), arguments.checkouts, any_version=arguments.any_version)
    except (TableError, OSError) as error:
        raise SystemExit(f"fetch_measurements.py: {error}") from None


def fetch(
    folder: Path, sources: Sequence[Source], checkouts: Path | None = None, *, any_version: bool = False
) -> list[Path]:
    """Write the tables of these sources, and SOURCES.txt; return what was written. Raises TableError where a source is
    missing, is not of the pinned commit, or does not have its layout."""
    written: list[Path] = []
    told: list[str] = []
    for source in sources:
        with _checkout(source, checkouts) as root:
            found = checksum(root, source.files)
            if found != source.sha256 and not any_version:
                raise TableError(
                    f"{source.name}: the files have the checksum {found}, those of {source.commit[:12]} have "
                    f"{source.sha256}: take that commit, or say --any-version"
                )
            told.append(_told(source) + ("" if found == source.sha256 else f"\n  but other files: sha256 {found}"))
            for name, table in source.tables(root).items():
                written.append(_write(folder / name, table))
                print(f"{written[-1]}: {_size(table)}, from {source.repository}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SOURCES.txt").write_text("\n".join([*told, "", *NOT_WRITTEN, ""]), encoding="utf-8")
    print("\n".join(f"not made: {line}" for line in NOT_WRITTEN))
    return written


def checksum(root: Path, patterns: Sequence[str]) -> str:
    """SHA-256 of the lines `sha256  path` of all files that match, in the order of their paths."""
    total = hashlib.sha256()
    for path in sorted(_matching(root, patterns)):
        total.update(f"{hashlib.sha256((root / path).read_bytes()).hexdigest()}  {path}\n".encode())
    return total.hexdigest()


def _matching(root: Path, patterns: Sequence[str]) -> set[str]:
    found = {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}
    return {path for path in found if (root / path).is_file()}


@contextlib.contextmanager
def _checkout(source: Source, checkouts: Path | None) -> Iterator[Path]:
    """The files of a source: in a folder that is there, or in one for as long as the tables are made."""
    if checkouts is not None:
        root = checkouts / source.name
        if not root.is_dir():
            raise TableError(f"{root} is missing: a checkout of github.com/{source.repository}")
        yield root
        return
    with tempfile.TemporaryDirectory() as folder:
        _download(source, Path(folder))
        yield Path(folder)


def _download(source: Source, root: Path) -> None:
    """Only the files that the tables are made of are kept of the archive."""
    print(f"fetching {source.archive}", file=sys.stderr)
    try:
        with urllib.request.urlopen(source.archive) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
            for member in archive:
                path = member.name.partition("/")[2]  # below the folder that GitHub adds
                if member.isfile() and any(_matches(path, pattern) for pattern in source.files):
                    content = archive.extractfile(member)
                    assert content is not None
                    (root / path).parent.mkdir(parents=True, exist_ok=True)
                    (root / path).write_bytes(content.read())
    except (urllib.error.URLError, tarfile.TarError) as error:
        raise TableError(f"{source.archive} could not be fetched ({error}): give a checkout with --from") from None


def _matches(path: str, pattern: str) -> bool:
    """As Path.glob: a * does not cross a slash."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _chosen(names: str | None) -> Sequence[Source]:
    wanted = names.split(",") if names else [source.name for source in SOURCES]
    unknown = set(wanted) - {source.name for source in SOURCES}
    if unknown:
        raise SystemExit(
            f"no source is named {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SOURCES)}"
        )
    return [source for source in SOURCES if source.name in wanted]


def _told(source: Source) -> str:
    return f"{source.name}: github.com/{source.repository} @{source.commit} ({source.licence}), sha256 {source.sha256}"


def _write(path: Path, table: list[dict[str, object]] | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(table, bytes):
        path.write_bytes(table)
        return path
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def _size(table: list[dict[str, object]] | bytes) -> str:
    return f"{len(table):,} bytes" if isinstance(table, bytes) else f"{len(table):,} rows"


if __name__ == "__main__":
    main()
