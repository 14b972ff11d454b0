"""A user's program whose marked lines a type checker refuses, because the wheel has types."""

from __future__ import annotations

import holdfast
from holdfast import preservation_policy

with holdfast.CheckpointManager("runs/gpt", rum=None) as manager:  # expect: call-arg
    manager.save("one", {})  # expect: arg-type
    manager.sav(1, {})  # expect: attr-defined

preservation_policy.LatestN("ten")  # expect: arg-type
holdfast.RamTier(copies="two")  # expect: arg-type
holdfast.RamTier(port=4711)  # expect: call-arg
