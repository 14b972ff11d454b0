"""Check that the host in one process behaves as the real one: other tests here rely on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.format.names import manifest_key
from tests.trust.in_process import in_process_host, read_checkpoint, right_array


def test_a_save_is_sealed_committed_and_read(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach(count=2)
        for step in (1, 2, 3):
            host.save(trainer, step)
            assert host.look().timeline[-1] == host.real(step, 1)
            host.settle()
        view = host.look()
        assert view.timeline == (host.real(2, 1), host.real(3, 1))
        for checkpoint in view.timeline:
            said, array = read_checkpoint(view.sources(checkpoint))
            assert said == checkpoint
            assert np.array_equal(array, right_array(checkpoint))
        host.delete(3)
        assert host.look().timeline == (host.real(2, 1),)


def test_a_new_agent_adopts_and_a_new_trainer_goes_on(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 7)
        host.crash_agent()
        host.kill_trainer(trainer)
        host.start_agent()
        host.settle()
        assert host.stores()[1].get(manifest_key(host.real(7, 1)))
        trainer = host.attach()
        assert trainer.place.origin == host.real(7, 1)
        assert trainer.attempt.number == 2
        host.branch(trainer, None)
        host.save(trainer, 3)
        host.settle()
        assert host.look().timeline == (host.real(3, 3),)
