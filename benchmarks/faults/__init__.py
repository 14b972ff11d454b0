"""Who reports a failed last save: eight libraries by ten faults (`python -m benchmarks.faults`).

`libraries` has each library behind the same calls, `program` trains with one of them, `acts` has
the faults, `trials` runs a program under one of them and judges what came of it.
"""
