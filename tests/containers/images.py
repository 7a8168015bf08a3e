"""Images that buildah builds and runs here, with no registry and no engine: a Debian base and stand-ins for what is pulled.

* The base is what debootstrap makes, with the packages that the public image of Python has: Python, pip, venv.
* Beam's program is built from its source, by ``docker/sdk.Dockerfile``, with this machine's Go.
* The launcher of Flex Templates, of which there is no source, is a script that starts Python as the launcher's log shows it.

``IMAGEPIVOT_CONTAINERS`` names the folder that holds all of it, by default ``build/containers``. It is deleted at the end, unless
``IMAGEPIVOT_KEEP_IMAGES`` is set: then the next run builds only what has changed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_MADE = ("storage", "run", "tmp", "base", "go", "template-launcher", "weights")
_SUITE = "bookworm"
_PACKAGES = "ca-certificates,python3-pip,python3-venv,python-is-python3"
_LAUNCHER = """#!/bin/sh
exec python "$FLEX_TEMPLATE_PYTHON_PY_FILE" "$@"
"""
_OF_THIS_MACHINE = ("/etc/ssl/certs", "/etc/pip.conf")
"""How this machine's pip reaches its index: mounted, so that no image holds it."""


def missing() -> str:
    """Return why no image can be built here; empty if nothing is missing."""
    if os.geteuid():
        return "not root, and debootstrap and overlay mounts need it"
    lacking = [name for name in ("buildah", "debootstrap", "go") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def _mounts() -> list[str]:
    return [word for path in _OF_THIS_MACHINE if Path(path).exists() for word in ("--volume", f"{path}:{path}:ro")]


class Images:
    """The images, in a storage of their own.

    Args:
        folder: for the storage, the base, and temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ, "TMPDIR": str(self._temporary), "BUILDAH_ISOLATION": "chroot"}
        self._buildah = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._buildah += ["--storage-driver", os.environ.get("STORAGE_DRIVER", "overlay")]

    def buildah(self, *words: str) -> str:
        """Run buildah; return what it prints."""
        done = subprocess.run([*self._buildah, *words], env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"buildah {' '.join(words)}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    # --- what is pulled elsewhere --------------------------------------------------------------------------------------

    def base(self) -> str:
        """Make the base; return its name."""
        tar = self.folder / "base" / "base.tar"
        if not tar.exists():
            root = self._temporary / "base"
            mirror = ("http://deb.debian.org/debian",)
            command = ("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(root), *mirror)
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-4000:]
            for emptied in ("var/cache/apt/archives", "var/lib/apt/lists"):
                shutil.rmtree(root / emptied)
                (root / emptied / "partial").mkdir(parents=True)
            tar.parent.mkdir()
            left_out = [f"--exclude=./{name}/*" for name in ("dev", "proc", "sys")]
            subprocess.run(["tar", "-C", str(root), *left_out, "-cf", f"{tar}~", "."], check=True)
            Path(f"{tar}~").rename(tar)
            shutil.rmtree(root)
        return self._from_lines("base", "FROM scratch", "ADD base.tar /", 'CMD ["python"]')

    def beam_sdk(self) -> str:
        """Build Beam's program from its source; return the name of the image."""
        go, modules = (subprocess.check_output(["go", "env", name], text=True).strip() for name in ("GOROOT", "GOMODCACHE"))
        path = "ENV PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        with_go = self._from_lines("go", "FROM localhost/base", "COPY --from=go / /usr/local/go", path, go=go)
        # The modules that this machine has are not downloaded again.
        Path(modules).mkdir(parents=True, exist_ok=True)
        mounts = (*_mounts(), "--volume", f"{modules}:/root/go/pkg/mod")
        options = ("--layers", "--quiet", "--build-arg", f"GO_IMAGE={with_go}", *mounts)
        self.buildah("build", *options, "--file", str(ROOT / "docker/sdk.Dockerfile"), "--tag", "localhost/beam-sdk", str(ROOT))
        return "localhost/beam-sdk"

    def template_launcher(self) -> str:
        """Make the stand-in for Google's launcher; return the name of the image."""
        folder = self.folder / "template-launcher"
        folder.mkdir(exist_ok=True)
        (folder / "python_template_launcher").write_text(_LAUNCHER)
        (folder / "python_template_launcher").chmod(0o755)
        copied = "COPY python_template_launcher /opt/google/dataflow/python_template_launcher"
        return self._from_lines("template-launcher", "FROM scratch", copied)

    def _from_lines(self, name: str, *lines: str, **contexts: str) -> str:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
        given = [word for key, path in contexts.items() for word in ("--build-context", f"{key}={path}")]
        self.buildah("build", "--layers", "--quiet", *given, "--tag", f"localhost/{name}", str(folder))
        return f"localhost/{name}"

    # --- our own -------------------------------------------------------------------------------------------------------

    def build(self, *words: str) -> None:
        """Build an image.

        Args:
            words: of the command line, which starts ``docker/build.sh``; options follow that name the stand-ins.
        """
        builder = " ".join([*self._buildah, "build", "--layers", "--format", "docker", "--pull-never", *_mounts()])
        stand_ins = (
            "BASE_IMAGE=localhost/base",
            "BEAM_SDK=localhost/beam-sdk",
            "TEMPLATE_LAUNCHER=localhost/template-launcher",
        )
        # One torch for all images, that of PyPI: the index with PyTorch's builds for the CPU may be out of reach.
        arguments = [word for value in (*stand_ins, "TORCH_INDEX=") for word in ("--build-arg", value)]
        done = subprocess.run(
            [*words, *arguments],
            cwd=ROOT,
            env={**self.environment, "BUILDER": builder},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    def config(self, image: str) -> dict[str, Any]:
        """Return the configuration of an image, as Docker has it."""
        return json.loads(self.buildah("inspect", "--type", "image", image))["Docker"]["config"]

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """Make a container for the block; yield its name."""
        name = self.buildah("from", "--pull-never", image)
        try:
            yield name
        finally:
            self.buildah("rm", name)

    def run(
        self,
        image: str,
        *words: str,
        user: str = "",
        volumes: Mapping[Path, str] = {},
        environment: Mapping[str, str] = {},
        code: int | Collection[int] = 0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a new container, which must end with an exit code, or one of several."""
        with self.container(image) as name:
            command = self.command(name, words, user=user, volumes=volumes, environment=environment)
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        said = f"{words}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert done.returncode in ({code} if isinstance(code, int) else code), said
        return done

    def docker(self, *words: str, environment: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        """Do what ``docker run --rm`` with these options, this image and these words does, which must succeed."""
        image, command, options = self._of_docker(words)
        options["environment"] |= environment
        return self.run(image, *command, **options)

    @contextmanager
    def docker_running(self, *words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Do what ``docker run --rm`` does for the block."""
        image, start, options = self._of_docker(words)
        with self.container(image) as name, log.open("wb") as said:
            command = self.command(name, start, **options)
            process = subprocess.Popen(command, env=self.environment, stdout=said, stderr=said, start_new_session=True)
            try:
                yield process
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _of_docker(self, words: Sequence[str]) -> tuple[str, list[str], dict[str, Any]]:
        """Return image, command, and user, volumes and settings of a line; containers share the network here, without GPUs."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--rm", action="store_true")
        for option in ("--network", "--gpus", "--entrypoint"):
            parser.add_argument(option)
        for option in ("--volume", "--env"):
            parser.add_argument(option, action="append", default=[])
        parser.add_argument("--user", default="")
        parser.add_argument("image")
        parser.add_argument("words", nargs=argparse.REMAINDER)
        assert list(words[:2]) == ["docker", "run"]
        given = parser.parse_args(words[2:])
        start = [given.entrypoint] if given.entrypoint else self.config(given.image)["Entrypoint"]
        volumes = {Path(host): inside for host, _, inside in (volume.partition(":") for volume in given.volume)}
        environment = dict(setting.split("=", 1) for setting in given.env)
        return given.image, [*start, *given.words], {"user": given.user, "volumes": volumes, "environment": environment}

    def command(
        self,
        name: str,
        words: Sequence[str],
        *,
        user: str = "",
        volumes: Mapping[Path, str] = {},
        environment: Mapping[str, str] = {},
    ) -> list[str]:
        """Return what runs a command in a container, in `environment`."""
        options = [word for host, inside in volumes.items() for word in ("--volume", f"{host}:{inside}")]
        options += [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        return [*self._buildah, "run", "--isolation=chroot", *(("--user", user) if user else ()), *options, name, "--", *words]

    def remove(self) -> None:
        """Delete everything that was made, and nothing else in the folder."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        for name in _MADE:
            shutil.rmtree(self.folder / name, ignore_errors=True)
