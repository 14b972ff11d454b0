"""The sequences: plan, save, commit, restore, retain. They act on stores and know no framework."""
