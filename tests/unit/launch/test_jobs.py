"""Job files run under stand-ins for the schedulers; hostile arguments stay data."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cluster import Cluster, Start
from shardwise.errors import ClusterError
from shardwise.launch import pytorch_job, ray_driver, slurm_script
from tests.support.launching import HOSTILE, write

WORDS = ["train.py", *HOSTILE]
# Prints its arguments in place of torchrun.
PYTHON = f"""#!{sys.executable}
import json, os, sys
call = json.dumps([sys.argv[1:], os.getcwd(), os.environ["A"]])
os.write(1, call.encode() + bytes([10]))  # one write: nodes print concurrently
sys.exit(int(os.environ.get("FAIL_" + sys.argv[sys.argv.index("--node-rank") + 1], 0)))
"""
# Starts one local process per task.
SRUN = """#!/bin/bash
for word; do
    case $word in --ntasks=*) tasks=${word#*=};; --*) ;; *) break;; esac
    shift
done
code=0
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" || code=$?; done
exit $code
"""
SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n'


def cpu_nodes(*counts: int, start: Start | None = None) -> Cluster:
    (node,) = Cluster.preset("cpu", nodes=len(counts), devices_per_node=1).nodes
    link = Cluster.preset("cpu", nodes=1, devices_per_node=2).nodes[0].link
    nodes = tuple(
        replace(node.machine(i), devices=node.devices * count, link=link)
        for i, count in enumerate(counts)
    )
    return Cluster(name="my $(job)", nodes=nodes, start=start or Start())


def value_of(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def run_slurm(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    write(folder / "bin/srun", SRUN, 0o755)
    write(folder / "bin/scontrol", SCONTROL, 0o755)
    job = write(folder / "job.sh", text)
    subprocess.run(["bash", "-n", str(job)], check=True, timeout=30)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]"} if "hetjob" in text else {}
    return subprocess.run(
        ["bash", str(job)],
        cwd=folder,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (1, 2, 2)])
def test_slurm_runs_every_node_once(tmp_path: Path, counts: tuple[int, ...]) -> None:
    (tmp_path / "a 'folder").mkdir()
    python = write(tmp_path / "my python", PYTHON, 0o755)
    start = Start(
        folder=str(tmp_path / "a 'folder"),
        python=str(python),
        environment=(("A", "$(touch pwned) '\n"),),
    )
    cluster = cpu_nodes(*counts, start=start)
    options = {"partition": "my part", "time": "2:00:00"}
    text = slurm_script(cluster, WORDS, options=options)
    groups = 1 + sum(a != b for a, b in itertools.pairwise(counts))
    assert text.count("#SBATCH hetjob") == groups - 1
    assert text.count('#SBATCH --partition="my part"') == groups
    assert "#SBATCH --job-name=my-job\n" in text
    done = run_slurm(tmp_path, text)
    assert done.returncode == 0, done.stderr
    calls = sorted(
        (json.loads(line) for line in done.stdout.splitlines()),
        key=lambda call: int(value_of(call[0], "--node-rank")),
    )
    for rank, (words, folder, variable) in enumerate(calls):
        assert words[:2] == ["-m", "torch.distributed.run"]
        assert value_of(words, "--node-rank") == str(rank)
        assert value_of(words, "--nnodes") == str(len(counts))
        assert value_of(words, "--nproc-per-node") == str(counts[rank])
        assert value_of(words, "--master-addr") == "n1"
        assert value_of(words, "--master-port") == "20007"
        assert words[-len(WORDS) - 1 :] == ["--", *WORDS]
        assert folder == start.folder
        assert variable == "$(touch pwned) '\n"
    assert len(calls) == len(counts)
    assert not list(tmp_path.rglob("pwned"))
    assert run_slurm(tmp_path, text, FAIL_1="3").returncode == 3


def test_slurm_requests_gpus_and_refuses_invalid_options() -> None:
    cluster = Cluster.preset("h100", nodes=4)
    text = slurm_script(cluster, ["-m", "mod"], port=1234)
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in text
    assert "SHARDWISE_PORT=1234\n" in text
    for options in ({"time": "1\n#SBATCH --x"}, {"a b": "1"}):
        with pytest.raises(ClusterError, match="is not a valid option"):
            slurm_script(cluster, ["a.py"], options=options)


def test_a_job_file_needs_the_same_start_settings_on_all_nodes() -> None:
    cluster = cpu_nodes(1, 1)
    other = replace(cluster.nodes[1], start=Start(folder="/x"))
    with pytest.raises(ClusterError, match="different start settings"):
        slurm_script(replace(cluster, nodes=(cluster.nodes[0], other)), ["a.py"])


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand `$(NAME)` and `$$` as Kubernetes does in a container's arguments."""
    out, i = "", 0
    while i < len(text):
        if text.startswith("$$", i):
            out, i = out + "$", i + 2
        elif text.startswith("$(", i) and (end := text.find(")", i)) > 0:
            name = text[i + 2 : end]
            out, i = out + variables.get(name, f"$({name})"), end + 1
        else:
            out, i = out + text[i], i + 1
    return out


def test_kubernetes_starts_every_node_once() -> None:
    start = Start(folder="/work", environment=(("A", "$(RANK)"),))
    cluster = cpu_nodes(3, 2, 2, start=start)
    options = {"image": "me/img:1", "namespace": "ml", "shared-memory": "8Gi", "memory": "9Gi"}
    job: dict[str, Any] = yaml.safe_load(pytorch_job(cluster, WORDS, options=options))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"] == {"name": "my-job", "namespace": "ml"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {
        "Master": 1,
        "Worker": 2,
    }
    for name, devices in (("Master", 3), ("Worker", 2)):
        assert replicas[name]["restartPolicy"] == "Never"
        (container,) = replicas[name]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["image"] == "me/img:1"
        assert container["workingDir"] == "/work"
        assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 29500}]
        assert container["resources"]["limits"] == {"cpu": devices, "memory": "9Gi"}
        variables = {"RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "29500", "HOME": "/root"}
        words = [expanded(word, variables) for word in container["args"]]
        assert value_of(words, "--node-rank") == "1"
        assert value_of(words, "--nproc-per-node") == str(devices)
        assert value_of(words, "--master-addr") == "m"
        assert words[-len(WORDS) - 1 :] == ["--", *WORDS]
        env = {item["name"]: expanded(item["value"], variables) for item in container["env"]}
        assert env["A"] == "$(RANK)"


def test_kubernetes_refuses_jobs_that_it_cannot_express() -> None:
    with pytest.raises(ClusterError, match="one template for the first node"):
        pytorch_job(cpu_nodes(2, 2, 1), ["a.py"])
    with pytest.raises(ClusterError, match="no home folder"):
        pytorch_job(cpu_nodes(1, start=Start(folder="~/x")), ["a.py"])
    with pytest.raises(ClusterError, match="unknown option 'partition'"):
        pytorch_job(cpu_nodes(1), ["a.py"], options={"partition": "x"})
    (replica,) = yaml.safe_load(pytorch_job(Cluster.preset("h100"), ["a.py"]))["spec"][
        "pytorchReplicaSpecs"
    ].values()
    limits = replica["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 8}


# Actors are objects in this process; calls run immediately.
RAY = """
class Handle:
    def __init__(self, value, options): self._value, self._options = value, options
    def __getattr__(self, name):
        call = getattr(self._value, name)
        return type("Method", (), {"remote": staticmethod(lambda *a: call(*a))})

class Remote:
    def __init__(self, cls): self.cls, self.settings = cls, {}
    def options(self, **settings): self.settings = settings; return self
    def remote(self): return Handle(self.cls(), self.settings)

def remote(cls): return Remote(cls)
def init(address): print("address", address)
def get(values, timeout): return values
"""
RAY_GROUPS = """
class Group:
    def __init__(self, bundles): self.bundles = bundles
    def wait(self, timeout): return True

def placement_group(bundles, strategy):
    print(strategy, bundles)
    return Group(bundles)

def remove_placement_group(group): print("removed")
"""


def test_ray_starts_every_node_once(tmp_path: Path) -> None:
    write(tmp_path / "ray/__init__.py", RAY + "from ray import util\n")
    write(tmp_path / "ray/util/__init__.py", "def get_node_ip_address(): return '10.9.8.7'\n")
    write(tmp_path / "ray/util/placement_group.py", RAY_GROUPS)
    strategies = "class PlacementGroupSchedulingStrategy:\n    def __init__(self, *a, **k): pass\n"
    write(tmp_path / "ray/util/scheduling_strategies.py", strategies)
    python = write(tmp_path / "my python", PYTHON, 0o755)
    start = Start(folder=str(tmp_path), python=str(python), environment=(("A", "'\"\\ $(x)\n"),))
    driver = write(tmp_path / "driver.py", ray_driver(cpu_nodes(2, 1, start=start), WORDS))

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(driver)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "STRICT_SPREAD [{'CPU': 2}, {'CPU': 1}]" in lines
    assert "removed" in lines
    calls = [json.loads(line) for line in lines if line.startswith("[[")]
    assert sorted(value_of(words, "--node-rank") for words, _, _ in calls) == ["0", "1"]
    for words, _, variable in calls:
        devices = ["2", "1"][int(value_of(words, "--node-rank"))]
        assert value_of(words, "--nproc-per-node") == devices
        assert value_of(words, "--master-addr") == "10.9.8.7"
        assert words[-len(WORDS) - 1 :] == ["--", *WORDS]
        assert variable == "'\"\\ $(x)\n"
    assert run(FAIL_1="3").returncode == 3
    assert "90" in ray_driver(cpu_nodes(1), ["a.py"], options={"timeout_s": "90"})
    with pytest.raises(ClusterError, match="timeout_s='x'"):
        ray_driver(cpu_nodes(1), ["a.py"], options={"timeout_s": "x"})
