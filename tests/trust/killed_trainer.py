"""Run a trainer that is killed: each step has one right state, which follows from the step alone.

Arguments: directory, options as JSON. It prints a JSON line when it opens the run, before and after
it restores, once it has checked what it restored, for each step, and for each save that was
reported as durable. Options: `kilobytes` of state, `sleep` seconds a step, `steps` before it ends,
`every` for the interval of saves, `ram` (False: none), `takeover`, and `acknowledge`: after how
many steps it waits until all is durable.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy

WAIT_SECS = 240.0


def state_at(step: int, kilobytes: int) -> dict:
    """What is right after `step`; -1: before the first one."""
    return {
        "w": jnp.arange(kilobytes * 256, dtype=jnp.int32) + step,
        "half": jnp.full((64, 64), step / 2, jnp.float32),
        "key": jax.random.key(step + 1),
        "sum": np.full(100, sum(range(step + 1)), np.int64),
        "seen": step,
        "said": f"step {step}",
    }


@jax.jit
def _is_ramp(w: jax.Array, start: jax.Array) -> jax.Array:
    return jnp.all(w == jnp.arange(w.shape[0], dtype=jnp.int32) + start)


def is_right(state: dict, step: int, kilobytes: int) -> bool:
    """Whether every bit of `state` is that of `step`."""
    expected = state_at(step, 0)
    return (
        state["w"].shape == (kilobytes * 256,)
        and bool(_is_ramp(state["w"], jnp.int32(step)))
        and np.array_equal(state["half"], expected["half"])
        and np.array_equal(jax.random.key_data(state["key"]), jax.random.key_data(expected["key"]))
        and np.array_equal(state["sum"], expected["sum"])
        and (state["seen"], state["said"]) == (step, expected["said"])
    )


advanced = jax.jit(lambda w, half: (w + 1, half + 0.5), donate_argnums=(0, 1))


def advance(state: dict, step: int) -> dict:
    """One step: arrays are donated, the NumPy array is changed in place."""
    w, half = advanced(state["w"], state["half"])
    state["sum"] += step
    key = jax.random.key(step + 1)
    return {
        "w": w,
        "half": half,
        "key": key,
        "sum": state["sum"],
        "seen": step,
        "said": f"step {step}",
    }


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    directory, options = sys.argv[1], json.loads(sys.argv[2])
    kilobytes = options.get("kilobytes", 200)
    every = options.get("every")
    say(opening=True)
    with holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(every) if every else None,
        preservation_policy=preservation_policy.LatestN(3),
        ram=holdfast.RamTier(linger_secs=30) if options.get("ram", True) else None,
        takeover=options.get("takeover", False),
    ) as manager:
        like = state_at(-1, kilobytes)
        say(restoring=True)
        started = time.monotonic()
        start, state = manager.resume(like)
        secs = time.monotonic() - started
        say(restored=True)
        report = manager.last_restore
        say(
            start=start,
            right=is_right(state, start - 1, kilobytes),
            sources=report.sources if report else {},
            skipped=report.skipped if report else (),
            passed_over=report.passed_over if report else (),
            secs=secs,
        )
        newest = -1
        for step in range(start, start + options.get("steps", 10**9)):
            state = advance(state, step)
            time.sleep(options.get("sleep", 0.0))
            try:
                saved = manager.save(step, state)
                newest = step if saved else newest
                say(step=step, saved=saved)
                if options.get("acknowledge") and step % options["acknowledge"] == 0:
                    manager.wait_until_finished(WAIT_SECS)
                    say(acknowledged=newest)
            except errors.SaveFailedError as error:
                say(failed=error.step, reason=str(error))
    say(end=True)


if __name__ == "__main__":
    main()
