"""Storage tiers: one small contract and its implementations."""
