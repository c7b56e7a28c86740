"""What containers and jobs of SLURM allow, in both versions of control groups; and what each rank has of it."""

import pytest

from lit_async_data import system
from lit_async_data.engine.resources import memory
from lit_async_data.engine.resources import plan as cores_module
from lit_async_data.engine.resources.memory import machine_memory
from lit_async_data.engine.resources.plan import cores

NESTED = "0::/slurm/job_7/step_0\n"
OLD = "5:cpu,cpuacct:/slurm/job_7\n4:hugetlb,memory:/slurm/job_7\n"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes this process see some files, by their names below /sys/fs/cgroup."""

    def given(files, own="0::/\n"):
        texts = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()} | {"/proc/self/cgroup": own}
        for name, text in texts.items():
            (tmp_path / name.replace("/", "_")).write_text(text)

    monkeypatch.setattr(memory, "open", lambda name: (tmp_path / name.replace("/", "_")).open(), raising=False)
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 32)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return given


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("", {"memory.max": "3000\n"}, 3000),
        ("", {"memory.max": "max\n"}, None),
        ("", {}, None),
        (NESTED, {"slurm/job_7/step_0/memory.max": "max", "slurm/job_7/memory.max": "3000"}, 3000),
        (NESTED, {"slurm/job_7/step_0/memory.max": "3000", "slurm/memory.max": "9000"}, 3000),
        (
            OLD,
            {"memory/slurm/job_7/memory.limit_in_bytes": "3000", "memory/elsewhere/memory.limit_in_bytes": "5"},
            3000,
        ),
    ],
)
def test_control_groups_and_those_around_them_limit_the_memory(groups, own, files, limit):
    groups(files, own)
    assert machine_memory() == (limit or system.memory())


@pytest.mark.parametrize(
    ("own", "files", "kills"),
    [
        ("", {}, 0),
        ("", {"memory.events": "max 7\noom 3\noom_kill 2\noom_group_kill 0\n"}, 2),
        (NESTED, {"slurm/job_7/memory.events": "oom_kill 1\n", "slurm/memory.events": "oom_kill 4\n"}, 5),
        (OLD, {"memory/slurm/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}, 3),
    ],
)
def test_what_the_kernel_killed_for_lack_of_memory_is_counted(groups, own, files, kills):
    groups(files, own)
    assert memory.out_of_memory_kills() == kills


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("", {"cpu.max": "400000 100000\n"}, 4),
        ("", {"cpu.max": "450000 100000\n"}, 4),
        ("", {"cpu.max": "50000 100000\n"}, 1),
        ("", {"cpu.max": "max 100000\n"}, 32),
        ("", {}, 32),
        (NESTED, {"slurm/job_7/step_0/cpu.max": "max 100000", "slurm/job_7/cpu.max": "800000 100000"}, 8),
        (OLD, {"cpu/slurm/job_7/cpu.cfs_quota_us": "200000", "cpu/slurm/job_7/cpu.cfs_period_us": "100000"}, 2),
        (OLD, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 32),
    ],
)
def test_control_groups_and_those_around_them_limit_the_cores(groups, own, files, limit):
    groups(files, own)
    assert cores() == limit
