"""Engines that run pipelines, each as it runs in earnest: processes of its own on this machine, and workers in a pool of their own.

* `flink`: one JobManager, two TaskManagers, and Beam's job server for Flink.
* `spark`: Beam's job server for Spark, which runs Spark in its own process.
* `prism`: Beam's Prism.

What they are made of is fetched once, by Maven and by Go's module proxy, into ``build/engines``.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apache_beam

from tests.integration.clusters import accepts, foreign_modules
from tests.integration.processes import wait_for
from tests.stores import free_port

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "engines"

_FETCH_SECONDS = 1200
_START_SECONDS = 240.0

# Runs a program that Linux ends with the process that started it, however that ends, and that hears of interrupts, as in a
# terminal. Programs do it, not `preexec_fn`: that would fork, and children of a process that uses gRPC abort now and then.
_WITH_PARENT = ("env", "--default-signal=INT", "setpriv", "--pdeathsig=KILL")

# Flink 1.19 and Spark 3.5 reach into Java's own packages, which Java 17 shows only if it is told to.
_OPENED = (
    *("java.io", "java.lang", "java.lang.invoke", "java.lang.reflect", "java.net", "java.nio", "java.text", "java.time"),
    *("java.util", "java.util.concurrent", "java.util.concurrent.atomic", "java.util.concurrent.locks"),
    *("sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
)
JAVA = (
    "java",
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:MaxMetaspaceSize=256m"),  # They live for minutes.
    "--add-exports=java.base/sun.net.util=ALL-UNNAMED",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
)

# The sizes of a TaskManager, which Flink's shell scripts otherwise work out.
FLINK_CONF = """\
jobmanager.rpc.address: localhost
jobmanager.rpc.port: {rpc}
jobmanager.memory.process.size: 700m
rest.address: localhost
rest.bind-address: 127.0.0.1
rest.port: {rest}
taskmanager.host: localhost
taskmanager.numberOfTaskSlots: 2
taskmanager.cpu.cores: 1
taskmanager.memory.framework.heap.size: 128m
taskmanager.memory.framework.off-heap.size: 64m
taskmanager.memory.task.heap.size: 300m
taskmanager.memory.task.off-heap.size: 64m
taskmanager.memory.managed.size: 96m
taskmanager.memory.network.min: 96m
taskmanager.memory.network.max: 96m
taskmanager.memory.jvm-metaspace.size: 256m
taskmanager.memory.jvm-overhead.min: 192m
taskmanager.memory.jvm-overhead.max: 192m
parallelism.default: 2
restart-strategy: fixed-delay
restart-strategy.fixed-delay.attempts: 3
restart-strategy.fixed-delay.delay: 2 s
heartbeat.interval: 2000
heartbeat.timeout: 20000
io.tmp.dirs: {folder}/tmp
"""
FLINK_LOG = """\
rootLogger.level = INFO
rootLogger.appenderRef.console.ref = Console
appender.console.name = Console
appender.console.type = CONSOLE
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1} %m%n
"""


class UnavailableError(Exception):
    """An engine cannot be had on this machine; the message says why."""


# --- what the engines are made of --------------------------------------------------------------------------------------


def fetched(name: str, *command: str, source: str, **environment: str) -> Path:
    """Return the folder ``build/engines/NAME``, which a command fills once.

    Args:
        name: of the folder.
        command: to run.
        source: what the folder is made from; when that changes, it is made anew.
        environment: variables for the command.

    Raises:
        UnavailableError: a program is missing, or the command failed.
    """
    for program in {"maven": ("java", "mvn"), "go": ("go",)}["maven" if command[0] == "mvn" else "go"]:
        if shutil.which(program) is None:
            raise UnavailableError(f"there is no {program} on this machine")
    folder, digest = BUILD / name, hashlib.sha256(source.encode()).hexdigest()
    mark = folder / ".made-from"
    if mark.is_file() and mark.read_text() == digest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False
    )
    if done.returncode:
        output = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        reason = next((line for line in output if "ERROR" in line), output[-1] if output else "")
        raise UnavailableError(f"{' '.join(command)} failed: {reason[:300]}")
    mark.write_text(digest)
    return folder


def of_maven(name: str) -> Path:
    """Return the folder that Maven makes from ``NAME/pom.xml``."""
    pom = HERE / name / "pom.xml"
    return fetched(name, "mvn", "--quiet", "--batch-mode", "--file", str(pom), "package", source=pom.read_text())


# --- processes ---------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """An engine at work.

    Attributes:
        root: folder with a folder for each process, in which ``log`` holds what it says.
        flags: Beam's flags that choose it.
        processes: the processes, by name; ``pool`` is that whose children the workers are.
    """

    root: Path
    flags: tuple[str, ...] = ()
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @contextmanager
    def running(
        self, name: str, *command: object, ready: Callable[[], object], stop: int = signal.SIGTERM, **environment: str
    ) -> Iterator[None]:
        """Run a program until it is ready and then for the block; at its end, or this process's, it gets a signal and is gone."""
        folder = self.root / name
        (folder / "tmp").mkdir(parents=True)
        words = [str(word) for word in (*_WITH_PARENT, *command)]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env={**os.environ, "TMPDIR": str(folder / "tmp"), **environment},
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        try:
            wait_for(lambda: ready() or process.poll() is not None, _START_SECONDS)
            assert process.poll() is None, f"{name} ended at its start:\n{self.log(name)}"
            yield
        finally:
            process.send_signal(stop)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log(self, name: str, lines: int = 60) -> str:
        """Return the last lines that a process has said."""
        with suppress(FileNotFoundError):
            return "\n".join((self.root / name / "log").read_text(errors="replace").splitlines()[-lines:])
        return ""

    def logs(self) -> str:
        """Return the last lines of all processes."""
        return "\n".join(f"--- {path.parent.name}\n{self.log(path.parent.name)}" for path in sorted(self.root.glob("*/log")))

    def workers(self) -> list[int]:
        """Return the process ids of the workers."""
        pool = self.processes["pool"].pid
        threads = Path(f"/proc/{pool}/task").iterdir()
        return [int(word) for thread in threads for word in (thread / "children").read_text().split()]

    @contextmanager
    def served_by_pool(self, jobs: int, **environment: str) -> Iterator[None]:
        """Run a pool of workers with these variables of the environment, and set the flags that lead to a job service and to it."""
        port = free_port()
        words = (sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={port}")
        environment = {**foreign_modules(self.root / "pool"), **environment}
        # At this signal the pool ends its workers, too.
        with self.running("pool", *words, ready=lambda: accepts(port), stop=signal.SIGINT, **environment):
            self.flags = (
                "--runner=PortableRunner",
                f"--job_endpoint=localhost:{jobs}",
                "--environment_type=EXTERNAL",
                f"--environment_config=localhost:{port}",
            )
            yield


@dataclass
class Flink(Engine):
    """A cluster of Flink.

    Attributes:
        rest: address of the JobManager's REST interface.
    """

    rest: str = ""

    def ask(self, path: str) -> dict[str, Any]:
        """Return an answer of the REST interface; empty if there is none."""
        with suppress(OSError), urllib.request.urlopen(f"{self.rest}{path}", timeout=10) as answer:
            return json.loads(answer.read())
        return {}

    def states(self) -> list[str]:
        """Return the states of all jobs."""
        return [job["status"] for job in self.ask("/jobs").get("jobs", [])]

    def busy(self) -> list[str]:
        """Return the names of the TaskManagers that hold tasks."""
        return [
            manager["id"]
            for manager in self.ask("/taskmanagers").get("taskmanagers", [])
            if manager["freeSlots"] < manager["slotsNumber"]
        ]

    def task_managers(self) -> int:
        """Return how many TaskManagers have reported to the JobManager."""
        return int(self.ask("/overview").get("taskmanagers", 0))

    @contextmanager
    def task_manager(self, name: str) -> Iterator[None]:
        """Run one more TaskManager."""
        words = (*self._java, "-Xmx450m", "org.apache.flink.runtime.taskexecutor.TaskManagerRunner", "--configDir", self.conf)
        words = (*words, "-D", f"taskmanager.resource-id={name}")
        with self.running(
            name, *words, ready=lambda: name in [m["id"] for m in self.ask("/taskmanagers").get("taskmanagers", [])]
        ):
            yield

    @property
    def conf(self) -> Path:
        """Folder of its configuration."""
        return self.root / "conf"

    @property
    def _java(self) -> tuple[str, ...]:
        path = f"{self.conf}:{of_maven('flink')}/lib/*"
        return (*JAVA, f"-Dlog4j.configurationFile={self.conf}/log4j.properties", "-cp", path)

    @contextmanager
    def job_manager(self) -> Iterator[None]:
        """Write the configuration and run the JobManager."""
        rest = free_port()
        self.rest = f"http://localhost:{rest}"
        (self.conf / "tmp").mkdir(parents=True)
        (self.conf / "flink-conf.yaml").write_text(FLINK_CONF.format(rpc=free_port(), rest=rest, folder=self.conf))
        (self.conf / "log4j.properties").write_text(FLINK_LOG)
        entry = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
        with self.running(
            "jobmanager", *self._java, "-Xmx400m", entry, "--configDir", self.conf, ready=lambda: self.ask("/overview")
        ):
            yield


# --- the engines -------------------------------------------------------------------------------------------------------


@contextmanager
def flink(root: Path, **environment: str) -> Iterator[Flink]:
    """Run a cluster of Flink, Beam's job server for it, and a pool of workers, which have these variables of the environment."""
    server = of_maven("flink-job-server") / "flink-job-server.jar"
    engine, jobs = Flink(root), free_port()
    with ExitStack() as stack:
        stack.enter_context(engine.job_manager())
        for name in ("taskmanager-1", "taskmanager-2"):
            stack.enter_context(engine.task_manager(name))
        words = (*JAVA, "-Xmx512m", "-jar", server, f"--flink-master={engine.rest.removeprefix('http://')}")
        words = (*words, f"--flink-conf-dir={engine.conf}", "--job-host=localhost", f"--job-port={jobs}")
        words = (*words, "--artifact-port=0", "--expansion-port=0", f"--artifacts-dir={root}/artifacts")
        stack.enter_context(engine.running("job-server", *words, ready=lambda: accepts(jobs)))
        stack.enter_context(engine.served_by_pool(jobs, **environment))
        yield engine


@contextmanager
def spark(root: Path, **environment: str) -> Iterator[Engine]:
    """Run Beam's job server for Spark with Spark in it, and a pool of workers, which have these variables of the environment."""
    engine, jobs = Engine(root), free_port()
    words = (*JAVA, "-Xmx900m", "-Dspark.ui.enabled=false", "-Dspark.driver.host=localhost", "-cp")
    words = (*words, f"{of_maven('spark-job-server')}/lib/*", "org.apache.beam.runners.spark.SparkJobServerDriver")
    words = (*words, "--spark-master-url=local[2]", "--job-host=localhost", f"--job-port={jobs}", "--artifact-port=0")
    words = (*words, "--expansion-port=0", f"--artifacts-dir={root}/artifacts")
    with (
        engine.running("job-server", *words, ready=lambda: accepts(jobs)),
        engine.served_by_pool(jobs, **environment),
    ):
        yield engine


@contextmanager
def prism(root: Path, **environment: str) -> Iterator[Engine]:
    """Run Prism, and a pool of workers, which have these variables of the environment."""
    module = f"github.com/apache/beam/sdks/v2/go/cmd/prism@v{apache_beam.__version__}"
    program = fetched("prism", "go", "install", module, source=module, GOBIN=str(BUILD / "prism")) / "prism"
    engine, jobs = Engine(root), free_port()
    words = (program, f"--job_port={jobs}", f"--web_port={free_port()}", "--log_kind=text")
    with engine.running("prism", *words, ready=lambda: accepts(jobs)), engine.served_by_pool(jobs, **environment):
        yield engine


if __name__ == "__main__":
    with {"flink": flink, "spark": spark, "prism": prism}[sys.argv[1]](Path(sys.argv[2]).absolute()) as started:
        print(" ".join(started.flags), getattr(started, "rest", ""), flush=True)
        sys.stdin.read()
