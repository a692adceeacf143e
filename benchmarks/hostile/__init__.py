"""Mutated and hostile files of every format that the tools read.

    python -m benchmarks.hostile --files 2000 --strings 1000 --json benchmarks/results/hostile.json

`formats.py` makes a valid example of each format, and reads it as the tools do. `mutate.py` damages
examples: bytes, values, sizes, nesting, encodings; and makes strings that try to run as code. Each
damaged file is read in a forked process with limits on time and memory, and ends in one of

    right      it was read
    refused    a `ShardwiseError` says what is wrong
    exception  anything else was raised
    hang       it took more than ten seconds of its processor's time
    memory     it took more than two gigabytes

of which the last three are faults. A hostile string runs if the file that its code would make is
there afterwards, or an audit hook saw a process, a socket or a foreign file being opened.
"""
