"""One process of a job that meets the others and ends. It prints the hosts as JSON.

Arguments: coordinator's address, count, rank, failure domain or nothing, peer address or nothing.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import jax

from holdfast.adapt.jax.processes import JaxProcesses
from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from holdfast.trainer.options import HostNetwork, Options
from holdfast.trainer.ranks.rendezvous import Rendezvous
from holdfast.trainer.ranks.topology import meet, place_of


def main() -> None:
    address, count, rank, domain, peer = sys.argv[1:]
    jax.distributed.initialize(address, int(count), int(rank))
    processes = JaxProcesses()
    rendezvous = Rendezvous(processes, SystemClock())
    options = Options(
        save=FixedIntervalPolicy(3),
        preservation=LatestN(1),
        ram=None,
        takeover=False,
        network=HostNetwork(failure_domain=domain or None),
    )
    try:
        found = meet(rendezvous, place_of(processes, options, peer or None))
    except HoldfastError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        os._exit(3)
    print(json.dumps({"leader": found.leader} | asdict(found)), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
