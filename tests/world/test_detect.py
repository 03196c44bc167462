"""Each launcher's environment gives its world, alone and inside another launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from meshrun.errors import UserError
from meshrun.world import World, detect
from meshrun.world.detect import LAUNCHERS, launch_key
from tests.world.environments import BATCH, HYDRA, OPENMPI, PROXIES, SRUN, TORCHRUN

RANK_3 = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, "node": 1, "nodes": 2, "host": "n2"}

OPENMPI_WORLD = World(**RANK_3, source="openmpi", job="openmpi-08336141b9a71234-46429f496c9eea83")
SLURM_WORLD = World(**RANK_3, source="slurm", job="slurm-42.0.0", hosts=("n1", "n2"))
TORCHRUN_WORLD = World(
    **RANK_3, source="torchrun", address="n1", port=29500, agent_store=True, attempt=2, job="torchrun-run-7"
)
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node=0, nodes=1, host="n2", source="none")


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "world"),
    [
        pytest.param({}, ALONE, id="no launcher"),
        pytest.param({"WORLD_SIZE": "8"}, ALONE, id="a lone WORLD_SIZE, as some pods have"),
        pytest.param(without(TORCHRUN, "LOCAL_RANK"), ALONE, id="RANK of a pod, without a local rank"),
        pytest.param(TORCHRUN | {"RANK": ""}, ALONE, id="an empty RANK"),
        pytest.param(TORCHRUN, TORCHRUN_WORLD, id="torchrun"),
        pytest.param(OPENMPI, OPENMPI_WORLD, id="mpirun"),
        pytest.param(HYDRA, World(**RANK_3, source="pmi"), id="mpiexec over two nodes"),
        pytest.param(SRUN, SLURM_WORLD, id="srun"),
        pytest.param(without(SRUN, "SLURM_STEP_ID"), SLURM_WORLD, id="srun, the step's older name"),
        pytest.param(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "42.0"}, SLURM_WORLD, id="srun --mpi=pmi2"),
        pytest.param(SRUN | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "s"}, SLURM_WORLD, id="srun --mpi=pmix"),
        pytest.param(
            SRUN | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"},
            SLURM_WORLD,
            id="srun, half exported",
        ),
        pytest.param(BATCH, ALONE, id="the batch shell"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "4294967291"}, ALONE, id="the batch step by number"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "4294967290"}, ALONE, id="salloc's interactive step"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "4294967292"}, ALONE, id="the extern step"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "batch"}, ALONE, id="the batch step by name"),
        pytest.param(BATCH | TORCHRUN, TORCHRUN_WORLD, id="torchrun in sbatch"),
        pytest.param(PROXIES | TORCHRUN, TORCHRUN_WORLD, id="torchrun in an srun step"),
        pytest.param(BATCH | OPENMPI, OPENMPI_WORLD, id="mpirun in sbatch, first node"),
        pytest.param(
            BATCH | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"} | OPENMPI, OPENMPI_WORLD, id="mpirun in sbatch"
        ),
        pytest.param(PROXIES | OPENMPI, OPENMPI_WORLD, id="mpirun in an srun step"),
        pytest.param(
            PROXIES | HYDRA, World(**RANK_3, source="pmi", job="pmi-42.0.0", hosts=("n1", "n2")), id="mpiexec in sbatch"
        ),
        pytest.param(OPENMPI | HYDRA, OPENMPI_WORLD, id="mpirun before PMI"),
    ],
)
def test_environment_gives_its_world(env: dict[str, str], world: World) -> None:
    assert detect(env, host="n2") == world


def test_four_ranks_of_mpirun_in_sbatch_are_told_apart_where_slurm_counts_two() -> None:
    ranks = [
        OPENMPI
        | BATCH
        | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2)}
        | {"SLURM_PROCID": str(rank // 2), "SLURM_NTASKS": "2"}
        for rank in range(4)
    ]
    worlds = [detect(env) for env in ranks]
    assert [world.rank for world in worlds] == [0, 1, 2, 3]
    assert [world.node for world in worlds] == [0, 0, 1, 1]
    assert {world.size for world in worlds} == {4}


def test_rows_are_asked_in_this_order_and_name_their_source() -> None:
    assert [name for name, _ in LAUNCHERS] == ["torchrun", "openmpi", "pmi", "slurm", "none"]
    everything = [TORCHRUN, OPENMPI, HYDRA, SRUN, {}]
    for position, (name, _) in enumerate(LAUNCHERS):
        env = {key: value for one in everything[position:] for key, value in one.items()}
        assert detect(env, host="n2").source == name


def test_host_is_this_machine_unless_given() -> None:
    assert detect({}).host == os.uname().nodename


def test_uneven_slurm_nodes_have_their_own_local_size() -> None:
    uneven = SRUN | {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    full = detect(uneven | {"SLURM_PROCID": "5", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"})
    last = detect(uneven | {"SLURM_PROCID": "10", "SLURM_NODEID": "2", "SLURM_LOCALID": "2"})
    assert (full.local_size, full.node, full.nodes) == (4, 1, 3)
    assert (last.local_size, last.node, last.nodes) == (3, 2, 3)


@pytest.mark.parametrize("nodes", [(4, 3), (2, 4), (4, 4, 1)])
def test_uneven_mpirun_nodes_have_their_own_local_size(nodes: tuple[int, ...]) -> None:
    places = [(node, local_rank) for node, ranks in enumerate(nodes) for local_rank in range(ranks)]
    for rank, (node, local_rank) in enumerate(places):
        world = detect(
            {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": str(len(places)),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(nodes[node]),
                "OMPI_MCA_orte_num_nodes": str(len(nodes)),
            }
        )
        assert (world.rank, world.local_size, world.node, world.nodes) == (rank, nodes[node], node, len(nodes))


def test_uneven_mpiexec_nodes_are_counted_by_the_slurm_step_of_its_proxies() -> None:
    env = PROXIES | HYDRA | {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    world = detect(env, host="n2.cluster.example")
    assert (world.node, world.nodes) == (1, 2)


def test_mpiexec_by_ssh_in_a_slurm_step_does_not_take_the_steps_node_for_its_own() -> None:
    first_node_everywhere = PROXIES | HYDRA | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    assert detect(first_node_everywhere, host="n2").node == 1


def test_requeued_slurm_job_is_a_later_attempt_with_another_key() -> None:
    world = detect(SRUN | {"SLURM_RESTART_COUNT": "3"})
    assert (world.attempt, world.job) == (3, "slurm-42.0.3")
    assert detect(BATCH | OPENMPI | {"SLURM_RESTART_COUNT": "3"}).attempt == 3
    assert detect(BATCH | {"SLURM_RESTART_COUNT": "3"}).attempt == 3


def test_restarts_are_those_of_torchrun_in_a_job_that_was_started_again_too() -> None:
    assert detect(TORCHRUN | {"SLURM_RESTART_COUNT": "1"}).attempt == 2


def test_torchruns_default_run_id_is_no_key() -> None:
    assert detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).job == "torchrun-n1:29500"
    assert detect(without(TORCHRUN, "TORCHELASTIC_RUN_ID")).job == "torchrun-n1:29500"


def test_torchrun_without_groups_counts_nodes_by_local_size() -> None:
    world = detect(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert (world.node, world.nodes) == (1, 2)
    uneven = without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE") | {"WORLD_SIZE": "5", "RANK": "1"}
    assert (detect(uneven).node, detect(uneven).nodes) == (0, 3), "the last node has one rank"


def test_torchrun_variables_exported_by_hand_take_the_node_from_the_slurm_step() -> None:
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    world = detect(SRUN | by_hand, host="n2")
    assert world == World(
        **RANK_3, source="torchrun", address="n1", port=29500, job="torchrun-n1:29500", hosts=("n1", "n2")
    )
    assert detect(by_hand | {"LOCAL_RANK": "3"}).local_size == 4
    with pytest.raises(UserError, match="LOCAL_RANK=1 of RANK=3 means several nodes, but LOCAL_WORLD_SIZE is not set"):
        detect(by_hand)
    with pytest.raises(UserError, match="LOCAL_RANK=1 of RANK=2 means several nodes"):
        detect(SRUN | by_hand | {"RANK": "2"})  # Slurm speaks of another rank, which may be on another node


def test_open_mpi_5_has_its_name_space_for_a_key() -> None:
    env = without(OPENMPI, "OMPI_MCA_orte_precondition_transports", "OMPI_MCA_orte_num_nodes")
    world = detect(env | {"PMIX_NAMESPACE": "prterun-n1-4186@1"})
    assert (world.job, world.nodes, world.node) == ("openmpi-prterun-n1-4186@1", 2, 1)


def test_mpiexec_on_one_node_of_a_slurm_job_has_the_job_and_its_launch_for_a_key() -> None:
    one_node = HYDRA | {"MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
    assert detect(BATCH | one_node).job == f"pmi-42-{launch_key(os.getppid())}"
    assert detect(one_node).job == f"pmi-{launch_key(os.getppid())}"


def test_launch_key_holds_the_start_of_a_process_whatever_its_name(tmp_path: Path) -> None:
    odd = tmp_path / "x) S 1 (y"
    odd.symlink_to(shutil.which("sleep") or "sleep")
    with subprocess.Popen([odd, "60"]) as child:
        try:
            host, pid, ticks = launch_key(child.pid).replace(".", "-").rsplit("-", 2)
            started = psutil.boot_time() + int(ticks) / os.sysconf("SC_CLK_TCK")
            assert (host, int(pid)) == (os.uname().nodename.replace(".", "-"), child.pid)
            assert abs(started - psutil.Process(child.pid).create_time()) < 2
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (TORCHRUN | {"RANK": "abc"}, r"RANK='abc' is not a whole number of at least 0"),
        (TORCHRUN | {"RANK": "-1"}, r"RANK='-1' is not a whole number of at least 0"),
        (TORCHRUN | {"RANK": "\u00b2"}, r"RANK='\u00b2' is not a whole number"),
        (TORCHRUN | {"RANK": "4"}, r"RANK=4 is not below WORLD_SIZE=4"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, r"RANK=3 is not below WORLD_SIZE=0"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, r"LOCAL_WORLD_SIZE=8 on one node is more than all 4 ranks"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 is not a port"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, r"TORCHELASTIC_RESTART_COUNT='x' is not"),
        (
            OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            r"OMPI_COMM_WORLD_LOCAL_RANK=2 is not below OMPI_COMM_WORLD_LOCAL",
        ),
        (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), r"OMPI_COMM_WORLD_LOCAL_SIZE='' is not a whole number"),
        (HYDRA | {"PMI_SIZE": "3"}, r"PMI_RANK=3 is not below PMI_SIZE=3"),
        (SRUN | {"SLURM_PROCID": "9"}, r"SLURM_PROCID=9 is not below SLURM_STEP_NUM_TASKS=4"),
        (SRUN | {"SLURM_NODEID": "2"}, r"SLURM_NODEID=2 and SLURM_LOCALID=1 are not among .*='2\(x2\)'"),
        (SRUN | {"SLURM_LOCALID": "2"}, r"SLURM_NODEID=1 and SLURM_LOCALID=2 are not among .*='2\(x2\)'"),
        (SRUN | {"SLURM_STEP_ID": "zero"}, r"SLURM_STEP_ID='zero' is not the number of a Slurm step"),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
            r"SLURM_STEP_TASKS_PER_NODE cannot be read: tasks per node '2\(x'",
        ),
        (SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST cannot be read: host list 'n\[1-' has"),
    ],
)
def test_values_that_cannot_be_are_refused_with_variable_and_value(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        detect(env)


def test_importing_the_room_leaves_torch_alone() -> None:
    code = "import sys, meshrun.world.cores, meshrun.world.rendezvous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("step", ["batch", "extern", "interactive", str(0xFFFF_FFFA)])
def test_a_shell_of_a_job_is_no_rank(step: str):
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    assert detect(env, "n1").source == "none"


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_is_none_is_refused(port: str):
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    with pytest.raises(UserError, match=f"MASTER_PORT={port} is not a port"):
        detect({**env, "MASTER_PORT": port}, "n1")
    assert detect({**env, "MASTER_PORT": "1"}, "n1").port == 1
