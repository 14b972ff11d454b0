"""A training run whose state can be told from the step alone: each step has one right state.

Arguments: directory, steps, options as JSON. It prints a JSON line for what it resumed, for each
step, and for its end. Its arrays are donated at every step, and its NumPy leaf is changed in place.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import holdfast
from holdfast import preservation_policy, save_decision_policy

SIZE = 300_000


def initial() -> dict:
    return {
        "w": jnp.zeros(SIZE),
        "m": [jnp.zeros((64, 64)), jnp.int32(0)],
        "key": jax.random.key(0),
        "host": np.zeros(1000, np.int64),
        "seen": -1,
    }


def step_function(w, m, key):
    key, sub = jax.random.split(key)
    noise = jax.random.normal(sub, (64, 64))
    return w + 1.0, [m[0] * 0.9 + noise, m[1] + 1], key


jitted = jax.jit(step_function, donate_argnums=(0, 1))


def advance(state: dict, step: int) -> dict:
    w, m, key = jitted(state["w"], state["m"], state["key"])
    state["host"] += step
    return {"w": w, "m": m, "key": key, "host": state["host"], "seen": step}


def fingerprint(state: dict) -> str:
    parts = [np.asarray(state["w"])[:3], np.asarray(state["m"][0]), np.asarray(state["m"][1])]
    parts += [np.asarray(jax.random.key_data(state["key"])), state["host"], np.int64(state["seen"])]
    import xxhash

    assert (np.asarray(state["w"]) == np.asarray(state["w"])[0]).all()
    return xxhash.xxh3_64_hexdigest(b"".join(np.ascontiguousarray(p).tobytes() for p in parts))


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    directory, steps, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    ram = options.get("ram", {"linger_secs": 30})
    if ram is not None and "every" in ram:
        ram["save_decision_policy"] = save_decision_policy.FixedIntervalPolicy(ram.pop("every"))
    policy = None
    if "interval" in options:
        policy = save_decision_policy.FixedIntervalPolicy(options["interval"])
    manager = holdfast.CheckpointManager(
        directory,
        save_decision_policy=policy,
        preservation_policy=preservation_policy.LatestN(options.get("keep", 3)),
        ram=holdfast.RamTier(**ram) if ram is not None else None,
        takeover=options.get("takeover", False),
    )
    with manager:
        start, state = manager.resume(initial())
        report = manager.last_restore
        sources = report.sources if report else {}
        say(start=start, sources=sources, fingerprint=fingerprint(state))
        for step in range(start, steps):
            state = advance(state, step)
            if options.get("sleep"):
                time.sleep(options["sleep"])
            saved = manager.save(step, state)
            say(step=step, saved=saved)
            if manager.reached_preemption(step):
                say(left=step)
                break
    say(end=True, fingerprint=fingerprint(state), latest=step)


if __name__ == "__main__":
    main()
