"""A job script for Slurm.

Enters: `Cluster`, the command of each rank, and options of sbatch. Leaves: the script's text.
Nodes of unequal numbers of devices are the components of a heterogeneous job, each started by a
step of its own; ranks meet on the first node that Slurm gives.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from shardwise.cluster import Cluster
from shardwise.launch.commands import quoted_path
from shardwise.launch.jobs import NO_OPTIONS, Group, JobSpec, job_spec
from shardwise.launch.places import Environment

SCRIPT = """\
#!/bin/bash
# {nodes} nodes, {ranks} ranks. Submit with: sbatch FILE
{header}
set -euo pipefail
{settings}
hosts=$(scontrol show hostnames "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}")
export SHARDWISE_MASTER=${{hosts%%$'\\n'*}}
export SHARDWISE_PORT={port}
python={python}
program=({program})

# On each node: FIRST is the number of its step's first node, then the step's devices per node.
node='first=$1 devices=$2 python=$3; shift 3
exec "$python" -m torch.distributed.run --nnodes {nodes} --nproc-per-node "$devices" \\
    --node-rank "$((first + SLURM_PROCID))" \\
    --master-addr "$SHARDWISE_MASTER" --master-port "$SHARDWISE_PORT" "$@"'

steps=()
trap 'kill -TERM "${{steps[@]}}" 2>/dev/null || true' TERM INT
{steps}
# The first step that fails ends the others.
code=0
for _ in "${{steps[@]}}"; do
    wait -n || code=$?
    if [ "$code" -ne 0 ]; then
        kill -TERM "${{steps[@]}}" 2>/dev/null || true
        break
    fi
done
wait
exit "$code"
"""
STEP = """\
srun {het}--ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --label \\
    bash -c "$node" node {first} {devices} "$python" "${{program[@]}}" &
steps+=($!)"""
ANY_PORT = "$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node do not meet"


def slurm_script(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    name: str | None = None,
    port: int = 0,
    environment: Environment = (),
    options: Mapping[str, str] = NO_OPTIONS,
) -> str:
    """Return the script for `sbatch`; `options` are its own: `{"partition": "gpu", "time":
    "2:00:00"}`.

    Port 0 is chosen from the job's number.
    """
    job = job_spec(cluster, argv, name=name, environment=environment, options=options)
    settings = [f"export {key}={shlex.quote(value)}" for key, value in job.environment]
    settings += [f"cd {quoted_path(job.folder)}"] if job.folder else []
    return SCRIPT.format(
        nodes=job.num_nodes,
        ranks=cluster.num_ranks,
        header=_header(job),
        settings="\n".join(settings),
        port=port or ANY_PORT,
        python=quoted_path(job.python),
        program=shlex.join(job.program),
        steps="\n".join(_step(job, index) for index in range(len(job.groups))),
    )


def _header(job: JobSpec) -> str:
    common = [f"#SBATCH --job-name={job.name}"]
    components = [_component(job, group) for group in job.groups]
    return "\n".join(common + "\n#SBATCH hetjob\n".join(components).split("\n"))


def _component(job: JobSpec, group: Group) -> str:
    amount = "gpus-per-node" if job.is_cuda else "cpus-per-task"
    own = {"nodes": str(group.num_nodes), "ntasks-per-node": "1", amount: str(group.num_devices)}
    return "\n".join(f"#SBATCH --{key}={_value(v)}" for key, v in (own | dict(job.options)).items())


def _value(text: str) -> str:
    """As sbatch reads it: words, with quotes and backslashes as in a shell."""
    plain = text and all(c.isalnum() or c in "-_.,:;/@%+=[]*" for c in text)
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _step(job: JobSpec, index: int) -> str:
    group = job.groups[index]
    return STEP.format(
        het=f"--het-group={index} " if len(job.groups) > 1 else "",
        nodes=group.num_nodes,
        first=group.first,
        devices=group.num_devices,
    )
