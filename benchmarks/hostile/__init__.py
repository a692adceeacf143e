"""Read mutated and hostile files of every format.

    python -m benchmarks.hostile --files 2000 --strings 1000 --json benchmarks/results/hostile.json

`formats.py` creates a valid example of each format and reads it as the tools do. `mutate.py`
corrupts bytes, values, sizes, nesting and encodings of examples, and creates strings that try to
run as code. Each corrupt file is read in a forked process with limits on time and memory, with one
of these results:

    right      it was read
    refused    a `ShardwiseError` explains the problem
    exception  another exception was raised
    hang       it took more than ten seconds of CPU time
    memory     it took more than two gigabytes

The last three are faults. A hostile string has run if the file that its code creates exists, or if
an audit hook has seen a process, a socket or a foreign file.
"""
