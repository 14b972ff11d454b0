"""Connect the processes of a job: its hosts, the common decisions, and what all must share."""
