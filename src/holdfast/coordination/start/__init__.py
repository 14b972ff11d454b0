"""Start an attempt: gather the hosts, choose what to continue from, and record the attempt."""
