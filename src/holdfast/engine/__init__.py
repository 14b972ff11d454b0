"""Sequences over stores: plan, save, commit, restore, retain. Independent of any framework."""
