"""Write the shardings of arrays as JSON, and find them again on the devices that are there."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError


def described(sharding: Any) -> dict[str, Any]:
    """Return a sharding as JSON."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = sharding.mesh
        return {
            "named": {
                "names": list(mesh.axis_names),
                "shape": list(mesh.devices.shape),
                "devices": [device.id for device in mesh.devices.flat],
                "axis_types": [kind.name for kind in getattr(mesh, "axis_types", ()) or ()],
                "spec": [list(part) if isinstance(part, tuple) else part for part in sharding.spec],
                "memory": sharding.memory_kind,
            }
        }
    if len(sharding.device_set) == 1:
        (device,) = sharding.device_set
        return {"single": device.id}
    return {"other": str(sharding)[:500]}


def found(description: dict[str, Any], where: str) -> Any:
    """Return the sharding that `described` described; `where` names the array for messages.

    An array that was on one device is restored to that device, or to the first one of this process.

    Raises:
        InvalidArgumentError: The devices that it needs are not here.
    """
    if "single" in description:
        local = {device.id: device for device in jax.local_devices()}
        device = local.get(description["single"], jax.local_devices()[0])
        return jax.sharding.SingleDeviceSharding(device)
    devices = {device.id: device for device in jax.devices()}
    named = description.get("named")
    if named is None or not set(named["devices"]) <= set(devices):
        needed = "another kind of sharding" if named is None else f"{len(named['devices'])} devices"
        raise InvalidArgumentError(
            f"restore {where}: it was saved on {needed}, found {len(devices)} devices; give the "
            "sharding wanted, such as args.StandardRestore(tree of jax.ShapeDtypeStruct)"
        )
    placed = np.array([devices[i] for i in named["devices"]], dtype=object)
    types = tuple(getattr(jax.sharding.AxisType, name) for name in named["axis_types"])
    mesh = jax.sharding.Mesh(
        placed.reshape(named["shape"]), tuple(named["names"]), axis_types=types or None
    )
    spec = (tuple(part) if isinstance(part, list) else part for part in named["spec"])
    parts = jax.sharding.PartitionSpec(*spec)  # type: ignore[no-untyped-call]
    return jax.sharding.NamedSharding(mesh, parts, memory_kind=named["memory"])
