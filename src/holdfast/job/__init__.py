"""The processes of a job: how they find each other and open a run together."""
