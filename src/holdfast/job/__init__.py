"""Connect the processes of a job with each other, and open a run in all of them."""
