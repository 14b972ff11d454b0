"""The operations of an agent on the tiers: what is written, copied, kept and removed."""
