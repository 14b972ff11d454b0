import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.demo.failures import STEPS_MIN, DemoFailureKind, choose_failures, strike
from holdfast.errors import InvalidArgumentError


def test_the_seed_chooses_the_failures() -> None:
    assert choose_failures(7, 256, kill_agent=True) == choose_failures(7, 256, kill_agent=True)
    assert len({choose_failures(seed, 256, kill_agent=True) for seed in range(20)}) > 15


@pytest.mark.parametrize("steps", [STEPS_MIN, 37, 256])
@pytest.mark.parametrize("kill_agent", [False, True])
def test_failures_are_apart_and_leave_steps_to_do(steps: int, kill_agent: bool) -> None:
    for seed in range(200):
        failures = choose_failures(seed, steps, kill_agent=kill_agent)
        at = [failure.step for failure in failures]
        assert at == sorted(set(at))
        assert at[0] > 0
        assert at[-1] < steps * 9 // 10
        kinds = [
            failure.kind for failure in failures if failure.kind is not DemoFailureKind.KILL_AGENT
        ]
        assert kinds == [DemoFailureKind.KILL, DemoFailureKind.TERMINATE]
        assert len(failures) == 2 + kill_agent
        assert all(0 <= failure.phase < 1 for failure in failures)


def test_killing_the_agent_too_leaves_the_other_failures_where_they_were() -> None:
    with_agent = {f.kind: f.step for f in choose_failures(3, 256, kill_agent=True)}
    without = {f.kind: f.step for f in choose_failures(3, 256, kill_agent=False)}
    assert without.items() <= with_agent.items()


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least"):
        choose_failures(0, STEPS_MIN - 1, kill_agent=False)


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_of_several_hosts_two_are_lost_one_after_the_other(hosts: int) -> None:
    lost_first = set()
    for seed in range(200):
        failures = choose_failures(seed, 64, kill_agent=False, hosts=hosts)
        assert [failure.kind for failure in failures] == [DemoFailureKind.LOSE_HOST] * 2
        assert failures[0].host != failures[1].host
        assert failures[1].step - failures[0].step > 64 // 20
        lost_first.add(failures[0].host)
    # Rank 0's host, whose agent leads, like any other.
    assert lost_first == set(range(hosts))


@pytest.mark.parametrize(
    ("kind", "signal"), [(DemoFailureKind.KILL, 9), (DemoFailureKind.TERMINATE, 15)]
)
def test_a_strike_hits_the_process_it_names(
    kind: DemoFailureKind, signal: int, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        strike(kind, process.pid, str(tmp_path), "host", SystemClock())
        assert process.wait(240) == -signal
