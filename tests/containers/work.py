"""What is done in the containers, and the pool of workers that does what is asked for from outside."""

import gzip
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.builders import tree
from tests.containers.images import Images
from tests.integration.clusters import accepts, served
from tests.integration.processes import wait_for
from tests.stores import free_port

POOL = 50000
"""The port of the pool; Beam's program knows no other."""


def multi30k(folder: Path) -> None:
    """Write a small Multi30K, as its authors lay it out."""
    task = folder / "multi30k" / "data" / "task2"
    for place in ("image_splits", "raw"):
        (task / place).mkdir(parents=True)
    for split in ("train", "val", "test_2016"):
        (task / f"image_splits/{split}_images.txt").write_text("".join(f"{split}-{number}.jpg\n" for number in range(4)))
        for language, number in itertools.product(("en", "de"), range(1, 6)):
            (task / f"raw/{split}.{number}.{language}.gz").write_bytes(gzip.compress(b"a dog runs through the snow\n" * 4))


def shards(folder: Path) -> dict[str, bytes]:
    """Return the shards below a folder, by relative path."""
    return {name: data for name, data in tree(folder).items() if name.endswith(".parquet")}


def opened(folder: Path) -> None:
    """Let any user write to a folder and everything in it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)


@contextmanager
def pool(images: Images, words: Sequence[str], folder: Path) -> Iterator[str]:
    """Run a pool of workers in a container, and Beam's job service; yield its address.

    Args:
        images: runs the container.
        words: of the line that starts ``docker run``.
        folder: for the logs.
    """
    jobs = free_port()
    service = ("-m", "apache_beam.runners.portability.local_job_service_main", f"--port={jobs}")
    mask = os.umask(0)  # What the command makes can be written by any user.
    try:
        with images.docker_running(*words, log=folder / "pool") as process:
            wait_for(lambda: accepts(POOL) or process.poll() is not None)
            assert process.poll() is None, (folder / "pool").read_text()
            with served(*service, port=jobs, folder=folder / "service"):
                yield f"localhost:{jobs}"
    finally:
        os.umask(mask)
